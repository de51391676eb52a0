"""Our sharded engine: ZeRO 0-3 on torch collectives, every knob real."""
