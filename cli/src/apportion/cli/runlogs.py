"""What runs wrote, read from their directories on this machine."""

from pathlib import Path

from apportion.cli.places import Place


async def logs_of(place: Place, job: str, *, errors: bool) -> list[tuple[str, str]]:
    """Name and text of each kept output of the job's runs: attempts in order, older files before newer ones."""
    from apportion.cli.question import job_named
    from apportion.contracts.ids import attempt_of_run, job_of_run, replica_of_run
    from apportion.node_agent.run_records import run_of_directory

    full = await job_named(place, job)
    found = []
    for directory in place.data_dir.glob("**/runs/*"):
        run = run_of_directory(directory.name)
        if run is None or job_of_run(run) != full:
            continue
        stream = "stderr" if errors else "stdout"
        text = "".join(_text(path) for path in (directory / f"{stream}.1", directory / stream))
        found.append(((attempt_of_run(run), replica_of_run(run)), f"{run} {stream}", text))
    return [(name, text) for _, name, text in sorted(found)]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
