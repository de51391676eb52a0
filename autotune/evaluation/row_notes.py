"""What the notes of a row state about its configuration in words: recomputation, kernels, adapters, moments, types."""

import re

from autotune.prediction.equations.software import stated_features

_NEGATED = r"(?<!no )(?<!not )(?<!without )"
_RECOMPUTE = re.compile(
    r"(?:\b(?P<before>none|no|full|selective)\s+(?:activation\s+)?(?:re-?comput\w*|checkpoint\w*)"
    r"|\b(?:activation[ _]checkpointing|re-?comput\w*|act_ckpt)\s*[=:]\s*(?P<after>none|off|full|selective)\b)(?!\s*\+)",
    re.IGNORECASE,
)
_FUSED_ATTENTION = re.compile(_NEGATED + r"\b(?:flash|memory-efficient|sdpa)[ _-]?(?:att\w*)?", re.IGNORECASE)
_ADAPTERS = re.compile(_NEGATED + r"\bq?lora\b", re.IGNORECASE)
_RANK = re.compile(r"\b(?:lora[ _-]?)?(?:r|rank)\s*[=:]?\s*(\d{1,4})\b", re.IGNORECASE)
_EIGHT_BITS = re.compile(r"(?:adamw?[ _-]?8[ _-]?bit|8[ _-]?bit[ _-]?adamw?)", re.IGNORECASE)
_TYPE = re.compile(_NEGATED + r"\b(?:mx|nv)?fp[48]\b(?!\s*(?:kv|cache))", re.IGNORECASE)


def noted_recompute(notes: str) -> str | None:
    """none, selective or full; None: the notes do not state it, or state several."""
    found = {(match["before"] or match["after"]).lower() for match in _RECOMPUTE.finditer(notes)}
    kinds = {"none" if kind in ("no", "off") else kind for kind in found}
    return kinds.pop() if len(kinds) == 1 else None


def noted_software(notes: str, optimizer: str | None) -> list[str]:
    """Words of software profiles (`equations/software.toml`): stated features, a fused attention kernel, moments in 8 bits."""
    words = ["=".join(feature) for feature in stated_features(notes)]
    if _FUSED_ATTENTION.search(notes):
        words.append("flash attention")
    if _EIGHT_BITS.search(f"{optimizer or ''} {notes}"):
        words.append("adam 8bit")
    return words


def noted_precision(notes: str) -> str | None:
    """8 or 4 bits, if the notes state them; None: they do not."""
    found = _TYPE.search(notes)
    return found[0].lower() if found else None


def noted_adapters(notes: str) -> int | None:
    """The rank of LoRA adapters; 0: it is not stated; None: no adapters."""
    found = _ADAPTERS.search(notes)
    if found is None:
        return None
    rank = _RANK.search(notes[found.end() :])
    return int(rank[1]) if rank else 0
