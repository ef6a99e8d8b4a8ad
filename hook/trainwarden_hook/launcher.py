"""``trainwarden-run``: the elastic launcher of one node."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from types import FrameType

from trainwarden_hook import segments, sole, zygote
from trainwarden_hook.addresses import UsageError
from trainwarden_hook.options import NO_PYTHON, Options, parse
from trainwarden_hook.supervisor import Supervisor

EXIT_WORKERS_FAILED = 1
EXIT_USAGE = 2
EXIT_BROKEN = 3
log = logging.getLogger("trainwarden.launcher")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on this node.

    Returns
    -------
    int
        0 finished or stopped by order, 1 the workers failed too often, 2 wrong use, 3 the launcher itself broke or another
        one runs this job here, 128 + n after signal n. A warden starts a launcher again that ended with neither 0, 1 nor 2.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.WARNING)
    try:
        options = parse(sys.argv[1:] if argv is None else argv, dict(os.environ))
        return _run(options)
    except UsageError as error:
        print(f"trainwarden-run: {error}", file=sys.stderr)
        # a warden tries again: who is in the way may be the launcher before, which does not end
        return EXIT_BROKEN if isinstance(error, sole.Occupied) else EXIT_USAGE
    except Exception:
        # neither the script's failure nor the caller's: a full disk, no more processes, a killed zygote
        log.exception("the launcher broke, not the workers; start it again (a warden does)")
        return EXIT_BROKEN


def _run(options: Options) -> int:
    _check_script(options.script)
    for note in options.notes:
        log.warning("%s", note)
    run_dir = _make_run_dir(options)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if options.workers_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    missing = zygote.preload(options.preload)
    if "torch" in missing:
        raise UsageError("torch is not installed in this environment; trainwarden-run needs torch 2.13 or newer")
    from trainwarden_hook import elastic, worlds

    nursery, claim = zygote.start(), None
    try:
        # after the zygote is there: neither it nor a worker of its may hold the claim longer than this process
        claim = sole.claim(options.job, options.node)
        _install_signals(options.signals)
        elastic.quiet_hostname(options.node)
        supervisor = _make_supervisor(options, nursery, run_dir)
        code = worlds.Runner(supervisor, run_dir).run()
    except elastic.SignalException as end:
        code = 128 + int(end.sigval)
    finally:
        _ignore_signals()
        nursery.close()
        _clean(options, run_dir, claim)
    return code


def _make_supervisor(options: Options, nursery: zygote.Zygote, run_dir: str) -> Supervisor:
    try:
        return Supervisor(options, nursery, run_dir)
    except OSError as error:
        raise UsageError(f"cannot serve in the run directory {run_dir}: {error.strerror or error}") from error


def _check_script(script: list[str]) -> None:
    if script[0] == NO_PYTHON:
        if shutil.which(script[1]) is None:
            raise UsageError(f"there is no program {script[1]!r} (--no-python)")
        return
    if script[0] != "-m" and not os.path.isfile(script[0]):
        raise UsageError(f"there is no training script {script[0]!r} in {os.getcwd()}")


def _make_run_dir(options: Options) -> str:
    if not options.run_dir:
        return tempfile.mkdtemp(prefix="trainwarden-")
    try:
        os.makedirs(options.run_dir, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create the run directory {options.run_dir}: {error.strerror}") from error
    if not os.access(options.run_dir, os.W_OK):
        raise UsageError(f"no permission to write in the run directory {options.run_dir}")
    return os.path.abspath(options.run_dir)


def _install_signals(numbers: Sequence[int]) -> None:
    from trainwarden_hook.elastic import SignalException

    def stop(number: int, _: FrameType | None) -> None:
        raise SignalException(f"launcher got signal {number}", signal.Signals(number))

    for number in numbers:
        signal.signal(number, stop)


def _ignore_signals() -> None:
    """A second Ctrl-C must not break the cleaning up."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _clean(options: Options, run_dir: str, claim: socket.socket | None) -> None:
    """Without a claim, memory and mailbox are another launcher's."""
    if claim is not None:
        segments.unlink_all(options.job, options.node)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(run_dir, "mailbox.sock"))
        claim.close()
    if not options.run_dir:
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
