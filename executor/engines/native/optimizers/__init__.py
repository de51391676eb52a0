"""Updates of a rank's flat master vector that need more than AdamW's numbers one by one."""
