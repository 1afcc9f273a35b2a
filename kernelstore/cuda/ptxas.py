"""Resource usage of kernels, read from what ``--ptxas-options=-v`` adds to a compiler's log."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

__all__ = ["Usage", "split_log"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What ptxas tells of one kernel, or of one function that kernels call; ``None`` where it tells nothing.

    Parameters
    ----------
    registers : int or None
        Per thread.
    shared_bytes : int or None
        Static shared memory per block.
    local_bytes : int or None
        Local memory per thread beside the stack.
    stack_bytes : int or None
        Stack per thread: the kernel's own frame, or with those of the functions it calls where ptxas adds them up.
    spill_store_bytes, spill_load_bytes : int or None
        Registers spilled, bytes of code per thread.
    constant_bytes : int or None
        Sum over constant banks. From sm_90 on ptxas reports none.
    """

    registers: int | None = None
    shared_bytes: int | None = None
    local_bytes: int | None = None
    stack_bytes: int | None = None
    spill_store_bytes: int | None = None
    spill_load_bytes: int | None = None
    constant_bytes: int | None = None


# The shapes of verbose lines, as NVRTC 12.9 and 13.5 write them. Anything else that ptxas says is a message.
_ENTRY = re.compile(r"ptxas info\s*: Compiling entry function '(.+)' for '\w+'")
_FUNCTION = re.compile(r"ptxas info\s*: Function properties for (\S+)")
_FRAME = re.compile(
    r"(?:ptxas)?[\s.]*([0-9]+) bytes stack frame, ([0-9]+) bytes spill stores, ([0-9]+) bytes spill loads"
)
_USED = re.compile(r"ptxas info\s*: (Used [0-9]+ registers.*)")
_OTHER = re.compile(
    r"ptxas info\s*: (?:"
    r"[0-9]+ bytes gmem(?:, [0-9]+ bytes \w+(?:\[[0-9]+\])?)*"
    r"|[0-9]+ bytes \w+\[[0-9]+\](?:, [0-9]+ bytes \w+\[[0-9]+\])*"
    r"|Compile time = [0-9.]+ ms"
    # Said of --maxrregcount, and only with -v.
    r"|Overriding (?:global maxrregcount|maximum register limit) .*"
    r")"
)
_REGISTERS = re.compile(r"Used ([0-9]+) registers")
_SHARED = re.compile(r"([0-9]+)(?:\+[0-9]+)? bytes smem")
_LOCAL = re.compile(r"([0-9]+)(?:\+[0-9]+)? bytes lmem")
_CUMULATIVE = re.compile(r"([0-9]+) bytes cumulative stack size")
_CONSTANT = re.compile(r"([0-9]+) bytes cmem\[[0-9]+\]")


def split_log(log: str) -> tuple[dict[str, Usage], str]:
    """Take the verbose lines of ptxas out of a log.

    Parameters
    ----------
    log : str
        Of a compile with ``--ptxas-options=-v``.

    Returns
    -------
    usage : dict of str to Usage
        By lowered name. Functions that kernels call are there too where ptxas reports them.
    rest : str
        The log as it is without ``-v``: warnings, errors and performance advice of ptxas stay.
    """
    usage: dict[str, Usage] = {}
    rest: list[str] = []
    kernel = framed = None
    for line in log.split("\n"):
        text = line.rstrip()
        if match := _ENTRY.fullmatch(text):
            kernel = match[1]
            usage[kernel] = Usage()
        elif match := _FUNCTION.fullmatch(text):
            framed = match[1]
            if framed != kernel:
                # Of a function that kernels call: what follows is no kernel's.
                kernel = None
        elif framed is not None and (match := _FRAME.fullmatch(text)):
            usage[framed] = _with_frame(usage.get(framed, Usage()), *map(int, match.groups()))
            framed = None
        elif kernel is not None and (match := _USED.fullmatch(text)):
            usage[kernel] = _with_used(usage[kernel], match[1])
        elif not _OTHER.fullmatch(text):
            rest.append(line)
    return usage, "\n".join(rest).rstrip()


def _with_frame(usage: Usage, stack: int, spill_stores: int, spill_loads: int) -> Usage:
    return replace(usage, stack_bytes=stack, spill_store_bytes=spill_stores, spill_load_bytes=spill_loads)


def _with_used(usage: Usage, text: str) -> Usage:
    stack = max(_number(_CUMULATIVE, text), usage.stack_bytes or 0)
    constants = [int(size) for size in _CONSTANT.findall(text)]
    return replace(
        usage,
        registers=_number(_REGISTERS, text),
        shared_bytes=_number(_SHARED, text),
        local_bytes=_number(_LOCAL, text),
        stack_bytes=stack,
        constant_bytes=sum(constants) if constants else None,
    )


def _number(pattern: re.Pattern[str], text: str) -> int:
    # A memory that the line does not name is not used.
    match = pattern.search(text)
    return 0 if match is None else int(match[1])
