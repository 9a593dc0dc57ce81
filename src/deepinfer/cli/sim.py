"""`deepinfer sim`: a cluster of 64 to 1,024 GPUs, simulated on this machine."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import fields
from pathlib import Path

from deepinfer.bench.report import append
from deepinfer.bench.simtimes import measured_times, read_kernels
from deepinfer.bench.simulation import (
    STUDIES,
    interval,
    panels_of,
    records_of,
    run_study,
    spelled,
)
from deepinfer.cli.common import SubParsers, UsageError, note, positive
from deepinfer.errors import ConfigError
from deepinfer.sim.cluster import simulate
from deepinfer.sim.settings import Settings, load_settings, parse_setting
from deepinfer.sim.times import Times, load_times

__all__ = ["add_parser", "run"]

_SEEDS = 5


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command and its forms."""
    parser = subparsers.add_parser(
        "sim",
        help="simulate a cluster",
        description="Simulate many GPUs with the engine's own policies and stated or measured "
        "times. Nothing is run on a device; docs/simulator.md says what the figures rest on.",
    )
    forms = parser.add_subparsers(title="forms", metavar="FORM", dest="form", required=True)
    one = forms.add_parser(
        "run",
        help="simulate one cluster",
        description="Simulate one cluster from several seeds; print means and 95 % confidence.",
        epilog="settings: " + "; ".join(_described()),
    )
    one.add_argument("--config", metavar="FILE", help="settings as TOML, JSON or YAML")
    one.add_argument("--json", action="store_true", help="print every value as JSON")
    study = forms.add_parser(
        "study",
        help="sweep a setting",
        description="Answer a question by a sweep: "
        + " ".join(f"{name}: {each.question}" for name, each in STUDIES.items()),
    )
    study.add_argument("name", metavar="NAME", help=", ".join(STUDIES))
    study.add_argument("--out", metavar="FILE", help="add the records to this file, as JSONL")
    study.add_argument("--plot", metavar="FILE", help="draw the curves as PNG")
    check = forms.add_parser(
        "check",
        help="set predictions beside measured steps",
        description="Predict the decode steps that `deepinfer bench decode`, `bench slice` or "
        "`python -m deepinfer.bench.scaling` measured, from stated times, from kernels measured on "
        "the same card or from other steps.",
    )
    check.add_argument("files", metavar="FILE", nargs="+", help="records of steps")
    check.add_argument("--device", default="h200", help="times: a packaged name or a file (h200)")
    for form in (one, check):
        form.add_argument(
            "--kernels",
            metavar="FILE",
            help="kernel times as `deepinfer bench kernels` keeps them replace stated ones",
        )
        form.add_argument(
            "--fit",
            metavar="FILE",
            help="fit times to decode steps that `deepinfer bench slice` took apart",
        )
        form.add_argument(
            "--exchange",
            metavar="FILE",
            help="fit the links of two GPUs to what `python -m deepinfer.bench.exchange` kept",
        )
    check.add_argument(
        "--hold",
        metavar="N",
        type=positive,
        action="append",
        default=[],
        help="fit nothing to steps of so many sequences, repeatable: they are predicted",
    )
    check.add_argument(
        "--each",
        action="store_true",
        help="predict every step from those of its kind that have another size, of --fit or FILE",
    )
    check.set_defaults(func=run)
    for form in (one, study):
        form.add_argument(
            "--set",
            dest="sets",
            metavar="KEY=VALUE",
            action="append",
            default=[],
            help="one setting, repeatable",
        )
        form.add_argument(
            "--seeds", type=positive, default=_SEEDS, metavar="N", help=f"seeds ({_SEEDS})"
        )
        form.set_defaults(func=run)


def _described() -> list[str]:
    return [f"{e.name} ({e.default!r}): {e.metadata['about']}" for e in fields(Settings)]


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    if args.form == "study":
        return _study(args)
    if args.form == "check":
        from deepinfer.bench.simcheck import compare_steps, read_measured, read_steps
        from deepinfer.bench.simcheck import spelled as table

        files = [Path(file).expanduser() for file in args.files]
        steps = [step for file in files for step in read_measured(file)]
        times = _times(args.device, args.kernels, None, args.exchange)
        if args.fit is not None:
            files = [Path(args.fit).expanduser()]
        fit = None
        if args.fit is not None or args.each:
            fit = [r for file in files for r in read_steps(file) if r.sequences not in args.hold]
        print(table(compare_steps(times, steps, fit, args.each)))
        return 0
    try:
        file = None if args.config is None else Path(args.config).expanduser()
        settings = load_settings(file, args.sets)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    times = _times(settings.device, args.kernels, args.fit, args.exchange)
    found = [simulate(settings, seed, times).values() for seed in range(args.seeds)]
    if args.json:
        print(json.dumps({key: [each[key] for each in found] for key in found[0]}))
        return 0
    print(f"{settings.gpus} GPUs, {settings.groups} expert groups, times of '{times.name}'")
    for key in found[0]:
        if "user" in key and not any(each[key] for each in found):
            print(f"  {key:<24} {'-':>12} no request began and ended in the counted steps")
            continue
        mean, half = interval([each[key] for each in found])
        width = f"± {half:.2g}" if math.isfinite(half) else ""
        print(f"  {key:<24} {mean:12,.4g} {width}")
    return 0


def _times(device: str, kernels: str | None, fit: str | None, exchange: str | None) -> Times:
    times = load_times(device)
    if fit is not None:
        from deepinfer.bench.simcheck import read_steps
        from deepinfer.bench.simfit import fitted_times

        times, told = fitted_times(times, read_steps(Path(fit).expanduser()))
        note("fitted: " + "; ".join(told))
    if exchange is not None:
        from deepinfer.bench.simfit import fitted_link

        times, link = fitted_link(times, Path(exchange).expanduser())
        note(f"fitted: {link}")
    if kernels is not None:
        times, told = measured_times(times, read_kernels(Path(kernels).expanduser()))
        note("measured: " + ("; ".join(told) or "nothing that a step takes"))
    return times


def _study(args: argparse.Namespace) -> int:
    name = args.name
    if name not in STUDIES:
        raise UsageError(f"no study '{name}'; there are {', '.join(STUDIES)}")
    if args.plot is not None:
        from deepinfer.bench.plot import require_matplotlib

        require_matplotlib()
    out = None if args.out is None else Path(args.out).expanduser()
    if out is not None:
        append(out, [])  # simulating takes long: find out first whether writing works
    try:
        changed = dict(parse_setting(text) for text in args.sets)
        lines = run_study(name, args.seeds, note, changed)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    print(spelled(name, lines))
    if out is not None:
        records = records_of(name, lines)
        append(out, records)
        note(f"{out}: {len(records)} records added")
    if args.plot is not None:
        from deepinfer.bench.simplot import draw_study

        study = STUDIES[name]
        file = Path(args.plot).expanduser()
        draw_study(study.question, study.axis, study.log, panels_of(name, lines), file)
    return 0
