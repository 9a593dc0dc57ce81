"""`deepinfer bench`: measure speed, keep the figures as JSONL, print them."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from deepinfer.bench.report import Record, append, changed_settings, read, read_lines, table
from deepinfer.cli.common import (
    SubParsers,
    add_settings,
    decimal,
    engine_config,
    integer,
    note,
    positive,
)
from deepinfer.config.load import DEMO_MODEL, GOLDEN_MODEL, resolve_model
from deepinfer.errors import ConfigError

__all__ = ["add_parser", "run"]

_FILE: Final = "benchmarks/cpu.jsonl"
_REPEAT: Final = 5


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command and its forms."""
    parser = subparsers.add_parser(
        "bench", help="measure speed", description="Measure speed, or print kept figures."
    )
    forms = parser.add_subparsers(title="forms", metavar="FORM", dest="form", required=True)
    cpu = forms.add_parser(
        "cpu",
        help="measure the CPU path",
        description="Measure decoding of 1 and 16 streams, prefill of 300 tokens, Python's share "
        "of a step, loading and memory, and print a table. A busy machine gives worse figures.",
    )
    cpu.add_argument(
        "--model",
        default=GOLDEN_MODEL,
        help=f"checkpoint folder, '{DEMO_MODEL}' or '{GOLDEN_MODEL}' ({GOLDEN_MODEL})",
    )
    cpu.add_argument("--out", metavar="FILE", help="add the records to this file, as JSONL")
    cpu.add_argument(
        "--repeat", type=positive, default=_REPEAT, metavar="N", help=f"repeats ({_REPEAT})"
    )
    add_settings(cpu)
    cpu.set_defaults(func=run)
    host = forms.add_parser(
        "host",
        help="measure the host's work for a step",
        description="Measure scheduling and applying a decode step without model, building its "
        "inputs, and how busy overlapped and plain order keep a device that takes 10 ms a step.",
    )
    batching = forms.add_parser(
        "batching",
        help="measure continuous batching",
        description="Generate a mix of requests of log-normal lengths together, one by one, and "
        "in the order of a packer that knows every length.",
    )
    batching.add_argument("--model", default=DEMO_MODEL, help=f"as for cpu ({DEMO_MODEL})")
    batching.add_argument(
        "--requests", type=positive, default=200, metavar="N", help="requests of the mix (200)"
    )
    batching.add_argument(
        "--alone", type=positive, metavar="N", help="requests to run one by one (all)"
    )
    for form, repeats in ((host, _REPEAT), (batching, 3)):
        form.add_argument("--out", metavar="FILE", help="add the records to this file, as JSONL")
        form.add_argument(
            "--repeat", type=positive, default=repeats, metavar="N", help=f"repeats ({repeats})"
        )
        form.set_defaults(func=run)
    add_settings(batching)
    grammar = forms.add_parser(
        "grammar",
        help="measure structured output",
        description="Measure compiling shapes, filling masks for 1 and 64 rows with a vocabulary "
        "of 129,280, and what of that a device step of 10 ms leaves to wait for.",
    )
    grammar.add_argument("--out", metavar="FILE", help="add the records to this file, as JSONL")
    grammar.add_argument("--repeat", type=positive, default=3, metavar="N", help="repeats (3)")
    add_settings(grammar)
    grammar.set_defaults(func=run)
    balance = forms.add_parser(
        "balance",
        help="measure placing experts by load",
        description="Load of the busiest rank over the mean on steps that a plan has not seen, "
        "with made-up skewed loads of 384 experts and with what a checkpoint's routers chose for "
        "packaged texts. Loads are counted, no rank is run.",
    )
    balance.add_argument("--model", default=DEMO_MODEL, help=f"as for cpu ({DEMO_MODEL})")
    balance.add_argument(
        "--texts", type=positive, default=256, metavar="N", help="most texts of a kind (256)"
    )
    balance.add_argument("--out", metavar="FILE", help="add the records to this file, as JSONL")
    balance.add_argument(
        "--repeat", type=positive, default=5, metavar="N", help="seeds of made-up loads (5)"
    )
    add_settings(balance)
    balance.set_defaults(func=run)
    _add_kernels(forms)
    _add_steps(forms)
    speculation = forms.add_parser(
        "speculation",
        help="simulate choosing verified drafts",
        description="Simulate a saturated device with a given cost of steps: no drafts, all "
        "drafts, and as many as the engine's planner chooses. No model is run.",
    )
    speculation.add_argument("--plot", metavar="FILE", help="draw the curves as PNG")
    speculation.add_argument(
        "--steps", type=positive, default=400, metavar="N", help="steps of each run (400)"
    )
    speculation.set_defaults(func=run)
    show = forms.add_parser("show", help="print kept figures", description="Print kept figures.")
    show.add_argument("file", nargs="?", default=_FILE, metavar="FILE", help=f"records ({_FILE})")
    show.add_argument(
        "--brief", action="store_true", help="goals of kernels, a line for each step, no parts"
    )
    show.add_argument("--plot", metavar="FILE", help="draw kernels' points as PNG")
    show.set_defaults(func=run)


def _add_kernels(forms: SubParsers[argparse.ArgumentParser]) -> None:
    kernels = forms.add_parser(
        "kernels",
        help="measure every op's implementations and installed libraries",
        description="Time every implementation of every op, and published libraries where they "
        "are installed, in alternation in one run: cold caches, CUDA graphs, a cool card and a "
        "loaded one, error against the fp32 reference, share of the chip's measured ceilings.",
    )
    kernels.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    kernels.add_argument("--op", default="", metavar="PATTERN", help="only ops or tasks like this")
    kernels.add_argument(
        "--shape",
        choices=("small", "real"),
        help="small: one case of each op; real: the model's dimensions (a card's default)",
    )
    kernels.add_argument(
        "--goals", action="store_true", help="only tasks and row counts that a goal speaks of"
    )
    kernels.add_argument(
        "--compile-only", action="store_true", help="compile and compare, time nothing"
    )
    kernels.add_argument(
        "--compared",
        metavar="FILE",
        help="take errors from records of the same sources, such as --compile-only wrote",
    )
    kernels.add_argument(
        "--alone",
        type=decimal,
        nargs="?",
        default=0.0,
        const=0.5,
        metavar="SECONDS",
        help="time each member by itself after a pause of SECONDS (0.5), not in alternation",
    )
    kernels.add_argument("--peers", action="store_true", help="installed libraries beside ours")
    kernels.add_argument(
        "--skip", action="append", default=[], metavar="NAME", help="leave out an implementation"
    )
    kernels.add_argument(
        "--seconds", type=positive, default=600, metavar="N", help="when to stop (600)"
    )
    kernels.add_argument(
        "--workers", type=positive, default=1, metavar="N", help="processes that compile (1)"
    )
    kernels.add_argument("--out", metavar="FILE", help="add the records to this file, as JSONL")
    kernels.add_argument("--plot", metavar="FILE", help="draw the points as PNG")
    kernels.set_defaults(func=_run_kernels)


_RELEASED: Final = "released"


def _add_steps(forms: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the forms that run whole steps of models of random weights."""
    about = {
        "layer": "Time a decode step of a few layers, each kind of layer by itself.",
        "decode": "Time a decode step of a whole model: forward pass, greedy choice, drafts.",
        "prefill": "Time a chunk of a prompt.",
        "slice": "Run one rank of N at the model's dimensions: rows of other ranks are made up, "
        "acceptance is set, the network is a model that is stated apart.",
    }
    for form, text in about.items():
        parser = forms.add_parser(
            form,
            help=text.partition(":")[0].rstrip(".").lower(),
            description=f"{text} Weights are random and made on the device, caches hold random "
            "bytes; no checkpoint is needed.",
        )
        parser.add_argument(
            "--dims",
            default=_RELEASED,
            metavar="WHICH",
            help=f"'{_RELEASED}', '{GOLDEN_MODEL}', '{DEMO_MODEL}', a checkpoint folder or a "
            f"config.json, for the dimensions alone ({_RELEASED})",
        )
        parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
        depth = 7 if form == "layer" else None
        parser.add_argument(
            "--depth",
            type=positive,
            default=depth,
            metavar="N",
            help=f"layers, evenly chosen ({depth or 'all'})",
        )
        default = 1 if form == "prefill" else 32
        parser.add_argument(
            "--sequences",
            type=positive,
            action="append",
            metavar="N",
            help=f"sequences of a step; repeatable ({default})",
        )
        rows = 4096 if form == "prefill" else 6
        parser.add_argument(
            "--rows",
            type=positive,
            metavar="N",
            help=f"rows of each sequence in a step ({rows}"
            + (", 4096 with --prefill)" if form == "slice" else ")"),
        )
        context = 131072 if form in ("decode", "slice") else 8192 if form == "layer" else 0
        parser.add_argument(
            "--context",
            type=integer,
            default=context,
            metavar="N",
            help=f"cached tokens of each sequence ({context})",
        )
        parser.add_argument(
            "--ranks",
            type=positive,
            default=8 if form in ("slice", "layer") else 1,
            metavar="N",
            help="hold the experts of one rank of N (%(default)s)",
        )
        if form in ("prefill", "slice"):
            parser.add_argument(
                "--replay",
                choices=("off", "compact"),
                default="compact" if form == "slice" else "off",
                help="what the decoder half runs of a prompt (%(default)s)",
            )
            parser.add_argument(
                "--keep",
                type=positive,
                default=140,
                metavar="N",
                help="positions that it runs under compact (%(default)s)",
            )
        if form == "slice":
            _add_slice(parser)
        parser.add_argument(
            "--use",
            action="append",
            default=[],
            metavar="OP=NAME",
            help="take this implementation of an op, also one that the engine does not choose",
        )
        add_settings(parser)
        parser.add_argument("--no-drafts", action="store_true", help="leave the draft blocks out")
        parser.add_argument(
            "--no-split", action="store_true", help="time the step only, without its ops"
        )
        parser.add_argument("--out", metavar="FILE", help="add the records to this file, as JSONL")
        parser.set_defaults(func=_run_steps)


def _add_slice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=("fold", "replay"),
        default="replay",
        help="where rows of other ranks come from (%(default)s)",
    )
    parser.add_argument(
        "--hot",
        type=decimal,
        default=1.0,
        metavar="X",
        help="rows of this rank over the mean of all (%(default)s)",
    )
    parser.add_argument(
        "--accepted",
        type=decimal,
        default=3.29,
        metavar="X",
        help="tokens that a sequence gains in a step (%(default)s)",
    )
    parser.add_argument("--prefill", action="store_true", help="a prompt's chunk, not decoding")
    parser.add_argument(
        "--with-prefill",
        type=positive,
        nargs="?",
        const=4096,
        metavar="ROWS",
        help="after decode steps a prompt's chunk of ROWS (4096) on the same weights",
    )
    for name, value, what in (
        ("--dispatch-us", 20.0, "latency of sending rows"),
        ("--combine-us", 25.0, "latency of sending results back"),
        ("--gb-s", 350.0, "rate of a rank's link, 1e9 bytes a second"),
    ):
        parser.add_argument(
            name, type=decimal, default=value, metavar="X", help=f"{what} (%(default)s)"
        )


def _run_steps(args: argparse.Namespace) -> int:
    from deepinfer.bench.slices import Fabric, Slice
    from deepinfer.bench.stepreport import step_table
    from deepinfer.bench.steps import Asked, StepRecord, measure_slice, measure_steps
    from deepinfer.config.load import load_model_config, released_config

    config = released_config()
    if args.dims != _RELEASED:
        is_file = Path(args.dims).expanduser().is_file()
        config = load_model_config(args.dims if is_file else resolve_model(args.dims))
    out = None if args.out is None else Path(args.out).expanduser()
    if out is not None:
        append(out, [])
    # The fastest kernels unless told otherwise, also those whose bits depend on the batch.
    settings = engine_config(args, numerics__batch_invariant="false")
    prefill = args.form == "prefill" or (args.form == "slice" and args.prefill)
    asked = Asked(
        depth=args.depth,
        sequences=tuple(args.sequences or (1 if prefill else 32,)),
        rows=args.rows or (4096 if prefill else 6),
        context=0 if prefill and args.form == "slice" else args.context,
        ranks=args.ranks,
        replay=args.replay if prefill else "off",
        keep=args.keep if prefill else 140,
        drafts=not args.no_drafts,
        split=not args.no_split,
        use=tuple((op, name) for op, _, name in (text.partition("=") for text in args.use)),
        numerics=settings.numerics,
        branches=settings.scheduling.graph_branches,
        settings=changed_settings(settings),
    )

    def keep(record: StepRecord) -> None:
        if out is not None:
            append(out, [record])

    if args.form == "slice":
        chunk = None
        if args.with_prefill:
            rows, replay = args.with_prefill, args.replay
            chunk = replace(
                asked, sequences=(1,), rows=rows, context=0, replay=replay, keep=args.keep
            )
        plan = Slice(ranks=args.ranks, mode=args.mode, hot=args.hot)
        fabric = Fabric(dispatch_us=args.dispatch_us, combine_us=args.combine_us, gb_s=args.gb_s)
        records = measure_slice(
            config, args.device, asked, plan, fabric, args.accepted, prefill, note, keep, chunk
        )
    else:
        records = measure_steps(args.form, config, args.device, asked, note, keep)
    if out is not None:
        note(f"{out}: {len(records)} records added")
    print(step_table(records))
    return 0


def _run_kernels(args: argparse.Namespace) -> int:
    from deepinfer.bench.kernelreport import GOAL_POINTS, kernel_table
    from deepinfer.bench.kernels import measure_kernels, read_record
    from deepinfer.bench.plot import draw_kernels, require_matplotlib
    from deepinfer.device import pick_device

    if args.plot is not None:
        require_matplotlib()
    out = None if args.out is None else Path(args.out).expanduser()
    if out is not None:
        append(out, [])
    on_card = pick_device(args.device).capability.arch != "cpu"
    compared = []
    if args.compared is not None:
        compared = read_lines(Path(args.compared).expanduser(), read_record)
    records = measure_kernels(
        args.device,
        args.shape or ("real" if on_card else "small"),
        args.op,
        args.peers,
        args.skip,
        args.seconds,
        args.workers,
        note,
        GOAL_POINTS if args.goals else None,
        args.compile_only,
        GOAL_POINTS,
        lambda part: None if out is None else append(out, part),
        compared,
        args.alone,
    )
    if out is not None:
        note(f"{out}: {len(records)} records added")
    if args.plot is not None:
        draw_kernels(records, Path(args.plot).expanduser())
    print(kernel_table(records))
    return 0 if args.compile_only or any(not record.failed for record in records) else 1


def _show(file: Path, plot: Path | None, brief: bool) -> str:
    """Lay out what a file holds, whichever suite wrote it; draw it where kernels did."""
    from deepinfer.bench.kernelreport import kernel_table
    from deepinfer.bench.kernels import read_record
    from deepinfer.bench.stepreport import step_table
    from deepinfer.bench.steps import read_step

    with suppress(ConfigError):
        records = read_lines(file, read_record)
        if plot is not None:
            from deepinfer.bench.plot import draw_kernels

            draw_kernels(records, plot)
        return kernel_table(records, brief)
    if plot is not None:
        raise ConfigError(f"{file} holds no records of kernels: there is nothing to draw")
    with suppress(ConfigError):
        return step_table(read_lines(file, read_step), brief)
    return table(read(file))


def run(args: argparse.Namespace) -> int:
    """Measure and print, or print what a file holds."""
    if args.form == "show":
        plot = None if args.plot is None else Path(args.plot).expanduser()
        print(_show(Path(args.file).expanduser(), plot, args.brief))
        return 0
    if args.form == "speculation":
        return _simulate(args)
    out = None if args.out is None else Path(args.out).expanduser()
    if out is not None:
        append(out, [])  # measuring takes long: find out first whether writing works
    records = _measure(args)
    print(table(records))
    if out is not None:
        append(out, records)
        note(f"{out}: {len(records)} records added")
    return 0


def _simulate(args: argparse.Namespace) -> int:
    from deepinfer.bench.speculation import spelled, sweep

    outcomes = sweep(acceptances=(0.3, 0.75, 0.95), steps=args.steps)
    print(spelled(outcomes))
    if args.plot is not None:
        from deepinfer.bench.plot import draw_speculation

        draw_speculation(outcomes, Path(args.plot).expanduser())
    return 0


def _measure(args: argparse.Namespace) -> list[Record]:
    """Run the suite that was asked for."""
    if args.form == "host":
        from deepinfer.bench.host import measure_host

        return measure_host(args.repeat, tell=note)
    config = engine_config(args)
    if args.form == "grammar":
        from deepinfer.bench.grammar import measure_grammar

        return measure_grammar(config.grammar, args.repeat, tell=note)
    folder = resolve_model(args.model)
    if args.form == "balance":
        from deepinfer.bench.balance import measure_balance

        return measure_balance(args.model, folder, config, args.texts, args.repeat, tell=note)
    if args.form == "batching":
        from deepinfer.bench.batching import measure_batching

        return measure_batching(
            args.model, config, args.repeat, args.requests, args.alone, tell=note
        )
    from deepinfer.bench.cpu import measure_cpu

    return measure_cpu(args.model, config, args.repeat, tell=note)
