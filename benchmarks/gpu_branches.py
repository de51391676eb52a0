"""x"""
from dataclasses import dataclass
PARTS={}
@dataclass
class Branch:
    file: str
BRANCHES=()
