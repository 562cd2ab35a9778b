"""Parallax beside its peers, on the hosts of the test bed.

    python -m benchmarks suite --quick              # what `make bench-quick` runs
    python -m benchmarks run lm --hosts 8 --rate 200mbit --emulated
    python -m benchmarks converge                   # real text to a fixed perplexity
    python -m benchmarks predict                    # the planner's forecasts beside what steps took
    python -m benchmarks partitions                 # several numbers of parts, and what is found
    python -m benchmarks profile dlrm               # in which code processors spend a step
    python -m benchmarks report runs/bench --out docs/benchmarks
    python -m benchmarks peers                      # which are installed

Figures of different runs say little; compare those of one table. `--emulated` puts a sleep in the
place of the layers' arithmetic, so that eight workers can share two cores; see README.md here.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import convergence, partitions, predictions, profiles, report, suite
from benchmarks.contest import Contest, Setting, hold
from benchmarks.crew import CrewError
from benchmarks.engines import ALONE, ENGINES, OURS
from benchmarks.goals import goals_table
from benchmarks.limits import bits_a_second
from benchmarks.results import CONVERGENCE, FORECASTS, PARTITIONS, Results
from benchmarks.testbed import Testbed
from benchmarks.testbed.bed import MAX_HOSTS
from benchmarks.workloads import NAMES, TEXT, by_name

RUNS = Path("runs/bench")


def measure(settings: list[Setting], folder: Path) -> list[str]:
    """Each setting is kept as soon as it is measured; those in which Parallax failed come back."""
    if any(setting.rate is not None for setting in settings):
        _check_testbed()
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    with tqdm(settings, unit="setting", file=sys.stdout, ncols=90) as bar:
        for setting in bar:
            try:
                contest = hold(setting, bar.set_description_str)
            except CrewError as error:
                failed.append(f"{setting.name} failed: {error}")
                bar.write(f"\n{failed[-1]}\n")
                continue
            contest.save(_path(setting, folder))
            bar.write(f"\n{setting.title}\n\n{report.table(contest)}\n")
    return failed


def _end(failed: list[str]) -> None:
    if failed:
        raise SystemExit("\n".join(failed))


def _check_testbed() -> None:
    reason = Testbed.missing()
    if reason is not None:
        raise SystemExit(
            f"the hosts of the test bed cannot be made: {reason}. `run … --loopback` compares the "
            "workers of one machine, without them"
        )


def run(args: argparse.Namespace) -> None:
    engines = _known(args.engines.split(",")) if args.engines else suite.LOOKED_UP
    engines = (OURS, *(name for name in engines if name != OURS))
    if ALONE not in engines:
        engines += (ALONE,)
    setting = Setting(
        args.workload,
        args.hosts,
        None if args.loopback else args.rate,
        args.emulated,
        engines,
        args.repetitions,
        args.turn_seconds,
    )
    _end(measure([setting], args.out))


def _known(engines: list[str]) -> tuple[str, ...]:
    unknown = sorted(name for name in set(engines) - set(ENGINES) if not _is_checkout(name))
    if unknown:
        raise SystemExit(f"--engines: {unknown[0]!r} is none of {', '.join(ENGINES)}")
    return tuple(engines)


def _is_checkout(name: str) -> bool:
    """Whether an engine is Parallax of another checkout; says so if there is none."""
    if not name.startswith(f"{OURS}@"):
        return False
    if (reason := ENGINES[name].missing) is not None:
        raise SystemExit(f"--engines: {reason}")
    return True


def run_suite(args: argparse.Namespace) -> None:
    settings = suite.quick() if args.quick else suite.full()
    kept = [] if args.fresh else [each for each in settings if _is_whole(each, args.out)]
    if kept:
        print(
            f"{len(kept)} of {len(settings)} settings are kept in {args.out}; --fresh repeats them."
        )
    failed = measure([each for each in settings if each not in kept], args.out)
    contests = [Contest.load(_path(each, args.out)) for each in settings if is_kept(each, args.out)]
    print(f"Goals\n\n{goals_table(contests)}\n\nKept in {args.out}.")
    _end(failed)


def _path(setting: Setting, folder: Path) -> Path:
    return folder / f"{setting.name}.json"


def is_kept(setting: Setting, folder: Path) -> bool:
    """Whether this very setting was measured; not one of its name with other engines."""
    path = _path(setting, folder)
    return path.exists() and Contest.load(path).setting == setting


def _is_whole(setting: Setting, folder: Path) -> bool:
    """Whether it is kept, and no engine failed: else it is worth another try."""
    return is_kept(setting, folder) and not Contest.load(_path(setting, folder)).failed


def converge(args: argparse.Namespace) -> None:
    _check_testbed()
    args.out.mkdir(parents=True, exist_ok=True)
    race = convergence.Race(args.perplexity, args.hosts, args.rate)
    with _standing("turn", ncols=110) as progress:
        outcome = convergence.run(race, progress)
    outcome.save(args.out / CONVERGENCE)
    print(f"\n{convergence.table(outcome)}\n")


def predict(args: argparse.Namespace) -> None:
    _check_testbed()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = list(itertools.product(args.workloads, predictions.HOSTS))
    with tqdm(settings, unit="setting", file=sys.stdout, ncols=90) as bar:
        bar.write(predictions.HEAD)
        for workload, num_hosts in bar:
            bar.set_description_str(f"{workload} on {num_hosts} hosts")
            found = predictions.predict(workload, num_hosts)
            predictions.keep(found, args.out / FORECASTS)
            bar.write(predictions.line(found))


def sweep(args: argparse.Namespace) -> None:
    _check_testbed()
    with _standing("turn") as progress:
        where = (args.workload, args.hosts, args.rate, args.repetitions)
        found = partitions.sweep(*where, progress)
    args.out.mkdir(parents=True, exist_ok=True)
    found.save(args.out / PARTITIONS)
    print(f"\n{partitions.table(found)}\n")


def sample(args: argparse.Namespace) -> None:
    _check_testbed()
    reason = profiles.missing()
    if reason is not None:
        raise SystemExit(f"profile: {reason}")
    engines = _known(args.engines.split(","))
    absent = [ENGINES[name].missing for name in engines if ENGINES[name].missing]
    if absent:
        raise SystemExit(f"--engines: {absent[0]}")
    with _standing("part") as progress:
        where = (args.workload, args.hosts, args.rate)
        found = profiles.profile(*where, engines, args.steps, progress)
    print(f"\n{profiles.table(args.workload, args.rate, found)}\n")


@contextmanager
def _standing(unit: str, ncols: int = 90) -> Iterator[Callable[[str], None]]:
    """A bar that goes on by one whenever it is told how things stand."""
    with tqdm(unit=unit, file=sys.stdout, ncols=ncols) as bar:

        def progress(standing: str) -> None:
            bar.set_description_str(standing)
            bar.update()

        yield progress


def write_report(args: argparse.Namespace) -> None:
    from benchmarks.page import write

    results = Results.load(args.folder)
    if not results.contests:
        raise SystemExit(f"{args.folder} has no results: run `python -m benchmarks suite` first")
    print(f"Wrote {write(results, args.out)}.")


def list_peers(_: argparse.Namespace) -> None:
    for name, engine in ENGINES.items():
        print(f"{name:15} {engine.title:20} {engine.missing or 'ready'}")


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="one workload on one set of hosts")
    one.add_argument("workload", type=_workload, help=f"one of {', '.join(NAMES)}")
    one.add_argument("--hosts", type=_hosts, default=4)
    one.add_argument("--rate", type=_rate, default="200mbit", help="of every link, as in 1gbit")
    one.add_argument("--loopback", action="store_true", help="no hosts: workers of this machine")
    one.add_argument("--emulated", action="store_true", help="a sleep in place of arithmetic")
    one.add_argument(
        "--engines",
        help=f"some of {', '.join(ENGINES)}, with commas between; "
        "parallax@PATH is Parallax of the checkout there",
    )
    one.add_argument("--repetitions", type=_count, default=5, help="turns of each engine")
    one.add_argument(
        "--turn-seconds", type=_positive, default=2.0, help="about, two steps at least"
    )
    one.add_argument("--out", type=Path, default=Path("runs/contest"), help="folder for results")
    one.set_defaults(act=run)
    many = commands.add_parser("suite", help="all settings")
    many.add_argument("--quick", action="store_true", help="two settings, under 10 minutes")
    many.add_argument("--out", type=Path, default=RUNS, help="folder for results")
    many.add_argument("--fresh", action="store_true", help="also what is kept there already")
    many.set_defaults(act=run_suite)
    text = commands.add_parser("converge", help="real text to a fixed perplexity, against DDP")
    text.add_argument("--perplexity", type=_positive, default=convergence.Race.target)
    text.add_argument("--hosts", type=_hosts, default=convergence.Race.num_hosts)
    text.add_argument("--rate", type=_rate, default=convergence.Race.rate)
    text.add_argument("--out", type=Path, default=RUNS, help="folder for results")
    text.set_defaults(act=converge)
    foretold = commands.add_parser("predict", help="the planner's forecasts beside what steps took")
    foretold.add_argument(
        "--workloads", type=_workloads, default=predictions.WORKLOADS, help="with commas between"
    )
    foretold.add_argument("--out", type=Path, default=RUNS, help="folder for results")
    foretold.set_defaults(act=predict)
    parts = commands.add_parser(
        "partitions", help="pushes in parts: several numbers, and what is found"
    )
    parts.add_argument("--workload", type=_workload, default="lm")
    parts.add_argument("--hosts", type=_hosts, default=4)
    parts.add_argument("--rate", type=_rate, default="200mbit")
    parts.add_argument("--repetitions", type=_count, default=11, help="turns of each number")
    parts.add_argument("--out", type=Path, default=RUNS, help="folder for results")
    parts.set_defaults(act=sweep)
    code = commands.add_parser("profile", help="in which code engines spend processors' time")
    code.add_argument("workload", type=_workload, help=f"one of {', '.join(NAMES)}")
    code.add_argument("--hosts", type=_hosts, default=4)
    code.add_argument("--rate", type=_rate, default="200mbit", help="of every link, as in 1gbit")
    code.add_argument("--engines", default="parallax,ddp-sparse,torchrec")
    code.add_argument("--steps", type=_count, default=60, help="that are sampled, of each engine")
    code.set_defaults(act=sample)
    page = commands.add_parser("report", help="a page with tables and plots of results")
    page.add_argument("folder", type=Path, nargs="?", default=RUNS)
    page.add_argument("--out", type=Path, default=Path("runs/report"))
    page.set_defaults(act=write_report)
    peers = commands.add_parser("peers", help="which engines are installed")
    peers.set_defaults(act=list_peers)
    return parser.parse_args(words)


def _workload(name: str) -> str:
    if name == TEXT:
        raise argparse.ArgumentTypeError("text is trained by `python -m benchmarks converge`")
    return _checked(by_name, name)


def _workloads(names: str) -> tuple[str, ...]:
    return tuple(_workload(name) for name in names.split(","))


def _hosts(text: str) -> int:
    return _count(text, MAX_HOSTS)


def _count(text: str, most: int = 10_000) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {most}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _rate(rate: str) -> str:
    return _checked(bits_a_second, rate)


def _checked(check: Any, value: str) -> str:
    try:
        check(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


if __name__ == "__main__":
    arguments = parse_args()
    arguments.act(arguments)
