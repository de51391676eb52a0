"""Our sharded engine: ZeRO 0-3 on torch collectives, with every knob implemented."""
