"""`deepinfer trace`: every value of a forward pass, from the reference model or the fast one.

Both write the same names, shapes and types, those of the recorded golden files, so that files can
be compared with each other and with these.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from deepinfer.cli.common import (
    SubParsers,
    UsageError,
    add_settings,
    engine_config,
    integer,
    note,
    parse_ids,
    positive,
)
from deepinfer.cli.values import KINDS, LayerIds, first_not_finite
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.config.model import ModelConfig
from deepinfer.errors import CheckpointError, NumericalError, RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from deepinfer.config.engine import EngineConfig
    from deepinfer.model.reference import IndexRounding, OutputProjection
    from deepinfer.weights.reader import Checkpoint

__all__ = ["TraceJob", "add_job", "add_parser", "make_trace", "read_job", "run"]

ModelPath = Literal["reference", "fast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """What to trace.

    decode_ids    ids fed to decoding, () = the greedy continuation
    num_decode    steps of decoding
    window_slots  softmax slots of the reference's window: as one prefill has them, or always all,
                  as the fast path has them; changes the last bits only
    """

    folder: Path
    config: ModelConfig
    engine: EngineConfig
    device: str
    token_ids: tuple[int, ...]
    num_decode: int
    decode_ids: tuple[int, ...]
    chunk: int | None
    window_slots: Literal["recorded", "full"]


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "trace",
        help="write every value of a forward pass",
        description="Run one sequence and write the values of every layer and position as "
        "safetensors, under the names of the golden files.",
    )
    parser.add_argument("--model", required=True, help="checkpoint folder, 'demo' or 'golden'")
    add_job(parser, required=True)
    parser.add_argument("--path", choices=("reference", "fast"), default="fast", help="(fast)")
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write")
    parser.set_defaults(func=run)


def add_job(parser: argparse.ArgumentParser, required: bool) -> None:
    """Add the flags that say what to run, for `trace` and `compare`."""
    parser.add_argument(
        "--token-ids", type=parse_ids, required=required, metavar="IDS", help="prompt, as in 1,2,3"
    )
    parser.add_argument(
        "--numerics",
        choices=("official", "noq"),
        help="official rounding, or fp32 without any (official)",
    )
    parser.add_argument("--chunk", type=positive, help="prefill the fast path in such pieces (all)")
    parser.add_argument(
        "--decode",
        type=integer,
        default=0,
        metavar="M",
        help="then decode M tokens, one at a time (0)",
    )
    parser.add_argument(
        "--decode-ids",
        type=parse_ids,
        metavar="IDS",
        help="M or M+1 ids: step j feeds id j, and drafts from id j+1 where given; otherwise both "
        "take the likeliest token",
    )
    parser.add_argument(
        "--window-slots",
        choices=("recorded", "full"),
        help="window slots in the reference's softmax: min(T, window) as recorded, or always all, "
        "as the fast path has them",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="of the fast path, whose arithmetic the reference takes over (cpu)",
    )
    add_settings(parser)


def read_job(args: argparse.Namespace, window_slots: Literal["recorded", "full"]) -> TraceJob:
    """Return the checked job of a command line; `window_slots` holds unless a flag says otherwise.

    Raises UsageError for flags that do not fit together, and RequestError for ids that the model
    does not have.
    """
    fed = args.decode_ids
    if args.decode < 0:
        raise UsageError(f"--decode: found {args.decode}, expected an integer >= 0")
    if fed is not None and args.decode == 0:
        raise UsageError("--decode-ids needs --decode M, the number of steps to decode")
    if fed is not None and len(fed) not in (args.decode, args.decode + 1):
        raise UsageError(
            f"--decode-ids: found {len(fed)} ids, expected {args.decode} or {args.decode + 1} for "
            f"--decode {args.decode}"
        )
    numerics = {} if args.numerics is None else {"numerics__mode": args.numerics}
    engine = engine_config(args, **numerics)
    folder = resolve_model(args.model)
    config = load_model_config(folder)
    _check_ids("--token-ids", args.token_ids, config)
    if not args.token_ids:
        raise RequestError("--token-ids is empty: give at least one id")
    _check_ids("--decode-ids", fed or (), config)
    length = len(args.token_ids) + args.decode
    if length > config.max_position_embeddings:
        raise RequestError(
            f"{length} tokens are more than the model's {config.max_position_embeddings} positions"
        )
    return TraceJob(
        folder=folder,
        config=config,
        engine=engine,
        device=args.device,
        token_ids=tuple(args.token_ids),
        num_decode=args.decode,
        decode_ids=tuple(fed or ()),
        chunk=args.chunk,
        window_slots=args.window_slots or window_slots,
    )


def _check_ids(flag: str, ids: Sequence[int], config: ModelConfig) -> None:
    outside = next((i for i in ids if not 0 <= i < config.vocab_size), None)
    if outside is not None:
        raise RequestError(
            f"{flag}: token id {outside} is outside the vocabulary 0..{config.vocab_size - 1}"
        )


def run(args: argparse.Namespace) -> int:
    """Write a trace."""
    job = read_job(args, "recorded")
    if args.path == "reference" and args.chunk is not None:
        note("--chunk has no effect on the reference: it takes whole sequences")
    out = Path(args.out).expanduser()
    _check_place(out)
    values = make_trace(job, args.path)
    _write(out, values, job, args.path)
    bad = first_not_finite(values, LayerIds.of(job.config))
    note(f"{out}: {len(values)} tensors, {len(job.token_ids)} + {job.num_decode} tokens")
    if bad is not None:
        raise NumericalError(f"{out} is written, but holds NaN or infinity, first in {bad}")
    return 0


class _Model(Protocol):
    """One sequence on either path."""

    def prefill(self, trace: MutableMapping[str, Tensor]) -> Tensor:
        """Run the prompt; return its logits [T, V]."""
        ...

    def decode(self, token_id: int) -> Tensor:
        """Feed one token; return its logits [V]."""
        ...

    def draft(self, first_token: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draft behind the last token fed."""
        ...


def _open(folder: Path) -> Checkpoint:
    """Open a checkpoint, refusing what LLM refuses: damage that no traced value would show."""
    from deepinfer.weights.load import check_steering
    from deepinfer.weights.reader import Checkpoint

    checkpoint = Checkpoint.open(folder)
    check_steering(checkpoint)
    return checkpoint


class _Reference:
    """The reference model as one growing sequence: it computes the whole again for each token."""

    def __init__(self, job: TraceJob) -> None:
        from deepinfer.chat.token_map import load_token_map
        from deepinfer.device import pick_device
        from deepinfer.model.fast.model import resolve_numerics
        from deepinfer.model.reference import ReferenceModel
        from deepinfer.weights.load import TensorSource

        # "auto" means what it means on the fast path's device, so that the two can be compared.
        settings = job.engine.numerics
        numerics = resolve_numerics(settings, pick_device(job.device).torch_device)
        projection: OutputProjection = "fp8" if numerics.fp8_output else "bf16"
        final = numerics.index_rounding == "final"
        self._rounding: IndexRounding = "final" if final else "reference"
        self._job = job
        self._fed: list[int] = []
        self._taps: Tensor | None = None
        self._model = ReferenceModel(
            job.config,
            TensorSource(_open(job.folder)).as_dict(),
            load_token_map(job.folder, job.config),
            settings.mode,
            projection,
        )

    def prefill(self, trace: MutableMapping[str, Tensor]) -> Tensor:
        """Run the prompt."""
        job = self._job
        return self._model.forward(job.token_ids, trace, job.window_slots, self._rounding)

    def decode(self, token_id: int) -> Tensor:
        """Run prompt and fed tokens again, with one more."""
        job = self._job
        self._fed.append(token_id)
        trace: dict[str, Tensor] = {}
        if job.window_slots == "full":
            ids = [*job.token_ids, *self._fed]
            logits = self._model.forward(ids, trace, "full", self._rounding)
        else:
            logits = self._model.decode(job.token_ids, self._fed, trace, self._rounding)
        self._taps = trace.get("main_hidden")
        return logits[-1]

    def draft(self, first_token: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draft behind the last token fed."""
        assert self._taps is not None, "draft before decode"
        last = len(self._job.token_ids) + len(self._fed) - 1
        return self._model.draft(self._taps, last, first_token)


class _Fast:
    """The fast model with caches for one sequence."""

    def __init__(self, job: TraceJob) -> None:
        from deepinfer.chat.token_map import load_token_map
        from deepinfer.device import pick_device
        from deepinfer.model.fast.model import FastModel
        from deepinfer.model.fast.session import Session

        engine = job.engine
        model = FastModel.load(
            _open(job.folder),
            engine.numerics,
            pick_device(job.device).torch_device,
            load_token_map(job.folder, job.config),
            engine.weights.dequantized_bytes,
            with_drafts=job.num_decode > 0,
        )
        self._job = job
        self._session = Session(
            model, len(job.token_ids) + job.num_decode, engine.cache.tokens_per_block
        )

    def prefill(self, trace: MutableMapping[str, Tensor]) -> Tensor:
        """Run the prompt in chunks."""
        return self._session.prefill(self._job.token_ids, self._job.chunk, trace)

    def decode(self, token_id: int) -> Tensor:
        """Feed one token."""
        return self._session.decode(token_id)

    def draft(self, first_token: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draft behind the last token fed."""
        return self._session.draft(first_token)


def make_trace(job: TraceJob, path: ModelPath) -> dict[str, Tensor]:
    """Run a job on one path; returns the values by name, on the CPU, in the order of `KINDS`.

    Raises NumericalError when decoding would have to choose among logits that are not finite.
    """
    import torch

    from deepinfer.assembly import set_cpu_threads

    set_cpu_threads(job.engine, job.config)
    model: _Model = _Reference(job) if path == "reference" else _Fast(job)
    values: dict[str, Tensor] = {}
    with torch.inference_mode():
        logits = model.prefill(values)
        if job.num_decode:
            values |= _decode(job, model, logits[-1], values)
    held = torch.bfloat16 if job.engine.numerics.mode == "official" else torch.float32
    result = {}
    for name, kind in KINDS.items():
        if name not in values:
            continue
        value = values[name].cpu()
        if name == "idx_topk":
            value = _ascending(value)
        dtype: torch.dtype = held if kind.dtype == "held" else getattr(torch, kind.dtype)
        result[name] = value.to(dtype).contiguous()
    return result


def _ascending(entries: Tensor) -> Tensor:
    """Sort selections, the absent ones (-1) last."""
    import torch

    ordered = entries.long().masked_fill(entries < 0, torch.iinfo(torch.int64).max).sort(-1).values
    return ordered.masked_fill(ordered == torch.iinfo(torch.int64).max, -1)


def _decode(
    job: TraceJob, model: _Model, logits: Tensor, values: MutableMapping[str, Tensor]
) -> dict[str, Tensor]:
    """Decode behind the prompt, drafting at every step."""
    import torch

    def likeliest(row: Tensor) -> int:
        if not bool(torch.isfinite(row).all()):
            where = first_not_finite(values, LayerIds.of(job.config)) or "a decode step"
            raise NumericalError(f"the logits are not finite; NaN or infinity is first in {where}")
        return int(row.argmax())

    greedy = [likeliest(logits)]
    rows: list[Tensor] = []
    drafts: list[tuple[Tensor, Tensor, Tensor]] = []
    for step in range(job.num_decode):
        row = model.decode(job.decode_ids[step] if job.decode_ids else greedy[-1])
        rows.append(row)
        greedy.append(likeliest(row))
        if job.config.num_nextn_predict_layers:
            given = job.decode_ids[step + 1 : step + 2]
            drafts.append(model.draft(given[0] if given else greedy[-1]))
    found = {"greedy_tokens": torch.tensor(greedy), "decode_logits": torch.stack(rows)}
    if drafts:
        names = ("draft_tokens", "draft_conf", "draft_logits")
        for name, parts in zip(names, zip(*drafts, strict=True), strict=True):
            found[name] = torch.stack(list(parts))
    return found


def _check_place(out: Path) -> None:
    """Refuse, before anything is computed, a name that no file can have: the file replaces it."""
    why = None
    if out.exists() and not out.is_file():
        why = "a folder has this name" if out.is_dir() else "it is no plain file"
    elif not out.parent.is_dir():
        why = f"there is no folder {out.parent}"
    if why is not None:
        raise CheckpointError(f"cannot write {out}: {why}; give another --out")


def _write(out: Path, values: dict[str, Tensor], job: TraceJob, path: ModelPath) -> None:
    """Write a file completely or not at all; raises CheckpointError when that fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    metadata = {
        "format": "deepinfer trace",
        "path": path,
        "numerics": job.engine.numerics.mode,
        **LayerIds.of(job.config).to_metadata(),
    }
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        save_file(values, partial, metadata)
        partial.replace(out)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink()
        raise CheckpointError(f"cannot write {out}: {error}") from error
