"""Building: one run of NVRTC, and the artifacts that come of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from kernelstore import plugins
from kernelstore.arch import Arch
from kernelstore.artifact import Artifact, Symbol
from kernelstore.cuda import driver, nvrtc, ptxas
from kernelstore.errors import InvalidOption
from kernelstore.kinds import ptx as ptx_kind
from kernelstore.request import Request
from kernelstore.toolchain import Toolchain

__all__ = ["run"]


def run(request: Request, toolchain: Toolchain) -> list[Artifact]:
    """Compile, and return what one run of NVRTC made: the artifact asked for first, its PTX behind a cubin.

    Raises
    ------
    CompileError, UnsupportedArch, ToolchainError
        As `kernelstore.cuda.nvrtc.compile_program`.
    """
    started = time.perf_counter()
    output = nvrtc.compile_program(
        request.source,
        name=request.name,
        options=request.command(() if toolchain.headers is None else toolchain.headers.include_dirs),
        name_expressions=request.name_expressions,
        headers=request.headers,
        arch=request.arch,
        resource_usage=request.kind == "cubin",
    )
    return _artifacts(request, output, toolchain, (time.perf_counter() - started) * 1000)


def _artifacts(request: Request, output: nvrtc.Output, toolchain: Toolchain, compile_ms: float) -> list[Artifact]:
    usage, log = ptxas.split_log(output.log)
    whole_log = output.log if request.options.verbose else log
    symbols = _symbols(output, usage)
    driver_version = driver.driver_version()

    def made(kind: str, arch: Arch, payload: bytes, text: str, known: tuple[Symbol, ...]) -> Artifact:
        plugin = plugins.load("kinds", kind)
        # Nothing is called what it is not, whatever an option did.
        plugin.check(payload, str(arch))
        described = plugin.describe(payload)
        # From sm_90 on ptxas does not tell the constant banks; the cubin does.
        constant_bytes = {symbol.lowered_name: symbol.constant_bytes for symbol in described.symbols}
        known = tuple(
            dataclasses.replace(symbol, constant_bytes=constant_bytes.get(symbol.lowered_name))
            if symbol.constant_bytes is None
            else symbol
            for symbol in known
        )
        return Artifact(
            key=request.artifact_key(kind, arch, toolchain.identity),
            kind=kind,
            arch=str(arch),
            payload=payload,
            toolchain=toolchain.text,
            driver_version=driver_version,
            ptx_version=described.ptx_version,
            origin="nvrtc",
            relocatable=described.relocatable,
            symbols=known,
            log=text,
            compile_ms=compile_ms,
            program=request.program,
        )

    artifacts: list[Artifact] = []
    if request.kind == "ltoir" and output.ltoir is not None:
        artifacts.append(made("ltoir", request.arch, output.ltoir, log, symbols))
    if request.kind == "cubin" and output.cubin is not None:
        artifacts.append(made("cubin", request.arch, output.cubin, whole_log, symbols))
    if output.ptx is not None:
        # What a run for PTX alone would say: ptxas had no part in it.
        said = "".join(line for line in log.splitlines(keepends=True) if not line.startswith("ptxas"))
        plain = tuple(Symbol(s.lowered_name, s.name_expression, s.what, s.parameters) for s in symbols)
        artifacts.append(made("ptx", request.arch.as_virtual(), output.ptx, said, plain))
    if not artifacts or artifacts[0].kind != request.kind:
        raise InvalidOption(
            f"NVRTC made no {request.kind} with the options {list(request.options.command)}",
            log=output.log,
            options=request.options.command,
            toolchain=toolchain.text,
            result=None,
            name=request.name,
            arch=str(request.arch),
        )
    return artifacts


def _symbols(output: nvrtc.Output, usage: Mapping[str, ptxas.Usage]) -> tuple[Symbol, ...]:
    """Name what the output holds: each name expression, then the kernels that nobody asked for."""
    text = "" if output.ptx is None else output.ptx.rstrip(b"\0").decode(errors="replace")
    entries = ptx_kind.entries(text)
    named = list(output.lowered_names.items())
    asked = {lowered for _, lowered in named}
    symbols = []
    for expression, lowered in [*named, *((None, lowered) for lowered in entries if lowered not in asked)]:
        is_kernel = lowered in entries or (output.ptx is None and not (expression or "").startswith("&"))
        used = usage.get(lowered)
        symbols.append(
            Symbol(
                lowered_name=lowered,
                name_expression=expression,
                what="kernel" if is_kernel else "variable",
                parameters=entries.get(lowered),
                **({} if used is None else dataclasses.asdict(used)),
            )
        )
    return tuple(symbols)
