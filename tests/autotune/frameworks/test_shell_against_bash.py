"""Launch scripts, read and run: bash with programs that write their arguments down decides what the options are."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.frameworks.shell import _pairs, _value, read_options

PROGRAM = """#!/bin/bash
printf '%s\\0' "$@" >> "$ARGUMENTS"
case "${0##*/}" in srun) shift; exec "$@";; esac
"""
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def launched(script: str, arguments: tuple[str, ...], variables: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """The options that train.py gets from bash."""
    (folder / "bin").mkdir()
    for name in ("torchrun", "python", "srun"):
        (folder / "bin" / name).write_text(PROGRAM)
        (folder / "bin" / name).chmod(0o755)
    (folder / "run.sh").write_text(script)
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "ARGUMENTS": str(folder / "words"), **variables}
    subprocess.run(["bash", "run.sh", *arguments], cwd=folder, env=environment, capture_output=True, check=False, timeout=30)
    words = (folder / "words").read_text().split("\0")
    last = max(position for position, word in enumerate(words) if word == "train.py")
    return {name: _value(value) for name, value in _pairs(words[last + 1 : -1])}


SCRIPTS = {
    "defaults": 'A=${A:-2}; : ${B:=3}; torchrun train.py --a $A --b $B --c ${C-5} --d "${D:-x y}" ${E:+--e}',
    "edited values": (
        "M=org/Model-7B.v1.tar; torchrun train.py --a ${M##*/} --b ${M%%.*} --c ${M%.*} --d ${M#*/} --e ${M/Model/Q} "
        "--f ${M//o/_} --g ${#M} --h ${M:4:5} --i ${M: -3} --j ${M^^} --k ${M,,}"
    ),
    "arrays": (
        "A=(--x 1 # why\n"
        " '--freq' \"([1]*2+[0]*1)*3\"  \"--name\" 'a b'\n"
        " # --no 1\n"
        ")\n"
        'B=("${A[@]}" --count ${#A[@]})\n'
        "B+=(--more)\n"
        "B[9]=--last\n"
        'torchrun train.py "${B[@]}" --one ${A[1]}'
    ),
    "unquoted arrays": ('A=(--x "1 2" --e "")\ntorchrun train.py ${A[@]} --y ${A[*]:0:2}'),
    "appended text": ('A="--x 1"\nA+=" --y 2"\nA="$A --z"\nN="$N --n"\ntorchrun train.py $A $N'),
    "empty variables": ('E=\nF=""\ntorchrun train.py --on $E --b 1 $F --c "$F" --d'),
    "quotes over lines": ("A='\n --x 1\n --y 2 '\nB=\"--z 3 \\\n --w 4\"\ntorchrun train.py ${A} $B \\\n --v 5"),
    "a comment ends the command": ("torchrun train.py --a 1 \\\n # why \\\n --b 2\n"),
    "conditions": (
        "N=4\n"
        'if [ "$N" -gt 2 ] && [ $N != 5 ]; then A=1\n'
        "elif true; then A=2; else A=3; fi\n"
        'if [[ $N == [3-5] && -n "$N" || $N == 9 ]]; then B=1; fi\n'
        "if ! [ $N -eq 4 ]; then C=1; else C=2;fi;torchrun train.py --a $A --b $B --c $C"
    ),
    "case": ('S=70B\ncase "$S" in\n 8B|7B) L=32 ;;\n (70*) L=80; H=2 ;;\n *) L=1;;\nesac\ntorchrun train.py --l $L --h $H'),
    "loops": (
        'for i in {1..2} 5; do A="$A --o$i $i"; done\n'
        "i=0\n"
        "while [ $i -lt 3 ]; do i=$((i+1)); done\n"
        "until [ $i -le 1 ]; do ((i--)); done\n"
        "torchrun train.py $A --i $i"
    ),
    "ends of loops": (
        "f() { for i in 1 2; do R=$i; if [ $i = 1 ]; then return; fi; done; }\nf\n"
        "for i in 1 2 3; do if [ $i = 2 ]; then continue; fi; A=$A$i; done\n"
        "for i in 1 2 3; do B=$i; [ $i -ge 2 ] && break; done\n"
        "while true; do C=$((C+1)); if [ $C -eq 1 ]; then continue; fi; break; done\n"
        "torchrun train.py --r $R --a $A --b $B"
    ),
    "functions": (
        'opts() { local t=$1; shift; ARGS="--t $t $*"; }\n'
        'function run { torchrun train.py --n $# "$@" $ARGS; }\n'
        "opts 4 --u 2\n"
        "run --b 2 --c"
    ),
    "local variables": (
        "A=1; C=7\n"
        "inner() { B=$A; A=5; }\n"
        "f() { local A=$1 C; declare D=4; inner; E=$A$C$D; for i in 1 2; do local F=$i; return; done; }\n"
        "f 2\n"
        "torchrun train.py --a $A --b $B --c $C --e $E --i $i"
    ),
    "arithmetic": (
        "A=3; B=$((A*2+1)); C=$(( B > 5 ? 2 : 1 )); ((A+=2)); let G=A*2; torchrun train.py --a $A --b $B --c $C --d "
        "$((7/2)) --e $((-7 % 4)) --f $((2**5)) --g $G --h $(( (A + B) * ${C} ))"
    ),
    "exports": ('export A=1 B="x y"\ndeclare C=3\nA=7 torchrun train.py --a $A --b "$B" --c $C'),
    "here-documents": (
        "X=5\n"
        "cat > /dev/null <<'END'\n"
        "python train.py --zz 2\n"
        "END\n"
        "bash <<END\n"
        "torchrun train.py --a $X --b \\$((1+2)) --c 1 --d 1\n"
        "END"
    ),
    "a script in a word": ('A=(--x 1 --y 2)\nexport Z=9\nsrun -l bash -c "python train.py ${A[*]} --z \\$Z --q ${Q:-1}"'),
    "a command in a variable": ('L="torchrun --nproc_per_node 8"\nC="$L train.py --a 1 --b \\"x y\\""\neval $C --c 3'),
    "tables": (
        "declare -A L=([8B]=32 [70B]=80)\nL[1B]=16\nS=70B\nT_8=2; V=T_8\ntorchrun train.py --l ${L[$S]} --k ${L[1B]} --t ${!V}"
    ),
    "output of commands": (
        "B=$(basename /a/b.sh .sh)\ntorchrun train.py --b $B --e $(echo 3 4) --d $(dirname /a/b) --s $(seq 2 3)"
    ),
    "the shell's own commands": (
        'set -euo pipefail\nset -- a b c\nshift\ntorchrun train.py --a $1 --n $# --all "$@" 2>&1 | tee log.txt'
    ),
    "a subshell": ("A=1\n(A=2; B=3)\ntorchrun train.py --a $A > out.log 2>&1 &\nwait"),
    "escapes": ('torchrun train.py --a \'x "y"\' --b "it\'s" --c $\'a\\tb\' --d a"b c"d --e=5 --f="x y" --g \\$x \\\n--h'),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_the_options_that_bash_hands_over(name: str, tmp_path: Path) -> None:
    script = read_options(SCRIPTS[name])
    options = {key: value for key, value in script.settings.items() if key.startswith("--")}
    assert options == launched(SCRIPTS[name], (), {}, tmp_path)
    assert not script.open


@pytest.mark.parametrize(
    ("script", "arguments", "variables"),
    [
        ("TP=$1\ntorchrun train.py --tp $TP --b ${2:-7} --all $3\n", ("4",), {}),
        ("case $1 in\n 8B) L=32 ;;\n 70B) L=80 ;;\nesac\ntorchrun train.py --l $L\n", ("70B",), {}),
        (
            "T=1\nwhile [[ $# -gt 0 ]]; do case $1 in --tp) T=$2; shift 2;; *) shift;; esac; done\ntorchrun train.py --t $T\n",
            ("--x", "--tp", "4"), {},
        ),
        ('[ -z "$E" ] && D=2 || D=3\nif [ "$1" -lt 2 ]; then exit 1; fi\ntorchrun train.py --d $D --n $#', ("3",), {"E": "x"}),
        ('torchrun train.py --gbs $((NODES * 8)) "$@"\n', ("--micro", "2"), {"NODES": "4"}),
    ],
)  # fmt: skip
def test_stated_arguments_and_variables(
    script: str, arguments: tuple[str, ...], variables: Mapping[str, str], tmp_path: Path
) -> None:
    stated = {str(number): text for number, text in enumerate(arguments, 1)} | dict(variables)
    read = read_options(script, None, stated)
    assert {key: value for key, value in read.settings.items() if key.startswith("--")} == launched(
        script, arguments, variables, tmp_path
    )
    assert not read.open and not read.unused
