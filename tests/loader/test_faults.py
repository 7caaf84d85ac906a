"""Faults in workers, and the end of a loader: errors with their attributes, no hang, no leak."""

from __future__ import annotations

import asyncio
import functools
import gc
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from leaks import leftovers, open_things, opened_since, start_endless
from shards import fail_on_7, index_numbers, number_of

from wdskit import DecodeError, Pipeline, PipelineError, SampleError, ShardError, StorageError, pack
from wdskit.engine.outcome import Outcome, WorkerTraceback
from wdskit.shards.index import index_folder

WAYS = [{"workers": 0, "threads": 2}, {"workers": 2}, {"workers": 1, "threads": 2, "persistent_workers": False}]


def split(pattern, **options):
    return Pipeline().stream(pattern, shuffle_shards=False, **options).split_by_node().split_by_worker()


# --- workers that die


def planned(pattern: str) -> Pipeline:
    index_folder(Path(pattern).parent, workers=1)
    return Pipeline().sequential(pattern, tail="drop")


def of_stream(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "threads"}


def endless(six: str) -> str:
    return f".stream({six!r}, resampled=True).split_by_worker().shuffle(5)"


def kill(pid: int) -> None:
    """Kill a child and wait until it is dead, without taking its exit status; signals are handled during the wait."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_a_worker_that_is_killed_between_epochs_is_named_by_the_next_one(six, is_waited_for):
    """No earlier call raises."""
    loader = planned(six).map(number_of).loader(workers=2, start_method="fork")
    others = set(multiprocessing.active_children())
    assert sorted(loader) == list(range(39))
    workers = sorted(set(multiprocessing.active_children()) - others, key=lambda worker: worker.pid)
    kill(workers[0].pid)
    if is_waited_for:
        workers[0].join()
    with pytest.raises(PipelineError, match=rf"^a worker process died: .*pid {workers[0].pid}.* was killed by SIGKILL"):
        list(loader)
    assert not set(multiprocessing.active_children()) - others
    assert sorted(loader) == list(range(39))
    assert loader.epoch == 2


LATE = """
import time
import wdskit.stages.run

def same(sample):
    return sample

if __name__ == "__mp_main__":
    {in_worker}

if __name__ == "__main__":
    wdskit.stages.run.REPORT_S = 0.5
    print(len(list({loader})))
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_script_without_a_guard_is_refused_at_its_line(python, six, tmp_path, start_method):
    """Each worker would run the script again: it would start workers, or wait in init_process_group."""
    pipe = f"wdskit.Pipeline().stream({six!r}).split_by_worker().to_tuple('cls').map(same)"
    loader = f"{pipe}.loader(workers=1, start_method={start_method!r})"
    top = "import wdskit\ndef same(value):\n    return value\n"
    script = tmp_path / "train.py"
    done = python.run(script, f"{top}def main():\n    return list({loader})\nmain()\n")
    assert done.returncode == 1
    assert f"{script}:6: each worker process would run this line again (start_method {start_method})." in done.stderr
    assert 'Put the code that runs the loader under `if __name__ == "__main__":`.' in done.stderr
    guards = ("if __name__ == '__main__': main()", "__name__ == '__main__' and main()")
    for number, guard in enumerate(guards):
        done = python.run(tmp_path / f"guarded{number}.py", f"{top}def main():\n    return list({loader})\n{guard}\n")
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("way", "start_method"), [("-c", "spawn"), ("-", "forkserver"), ("folder", "spawn")])
def test_a_function_of_a_program_that_workers_cannot_import_is_refused(six, tmp_path, way, start_method):
    pipe = f"wdskit.Pipeline().stream({six!r}).split_by_worker().to_tuple('cls').map(same)"
    code = (
        f"import wdskit\ndef same(value):\n    return value\n{pipe}.loader(workers=1, start_method={start_method!r})\n"
    )
    (tmp_path / "__main__.py").write_text(code)
    words = {"-c": ["-c", code], "-": ["-"], "folder": [str(tmp_path)]}[way]
    done = subprocess.run([sys.executable, *words], input=code, text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert "workers cannot import the program that defines `same`" in done.stderr
    assert "Define the function at the top of a module" in done.stderr


def test_a_function_under_the_guard_is_refused_by_name(python, six, tmp_path):
    """Workers import the script without the code under its guard."""
    pipe = f"wdskit.Pipeline().stream({six!r}).split_by_worker().to_tuple('cls').map(same)"
    function = "def same(value):\n        return value\n"
    script = (
        f"import wdskit\nif __name__ == '__main__':\n    {function}    {pipe}.loader(workers=1, start_method='spawn')\n"
    )
    done = python.run(tmp_path / "train.py", script)
    assert done.returncode == 1
    assert '`same` is defined under `if __name__ == "__main__":`, which workers do not run' in done.stderr
    assert "Define the function at the top of a module" in done.stderr


@pytest.mark.parametrize(
    ("start_method", "in_worker"), [("forkserver", "time.sleep(3)"), ("spawn", "raise SystemExit(7)")]
)
def test_a_worker_that_does_not_start_names_the_guard(python, six, tmp_path, start_method, in_worker):
    """Each worker first runs the script's module level, which may wait for ever."""
    index_folder(Path(six).parent, workers=1)
    pipe = f"wdskit.Pipeline().exact({six!r}).to_tuple('cls').map(same)"
    loader = f"{pipe}.loader(workers=1, start_method={start_method!r})"
    done = python.run(tmp_path / "train.py", LATE.format(loader=loader, in_worker=in_worker))
    if "sleep" in in_worker:
        assert (done.returncode, done.stdout) == (0, "39\n")
        late = r"worker 0 \(pid \d+\) for \d s\. It has not started. It may still run the script's own code"
        assert re.search(late, done.stderr)
    else:
        assert done.returncode == 1
        assert re.search(r" exited with status \d\. It printed why\.", done.stderr)


@pytest.mark.parametrize(("settings", "signals_group"), list(zip(WAYS, [True, True, False], strict=True)), ids=str)
def test_ctrl_c_ends_everything_with_one_traceback(python, six, tmp_path, settings, signals_group):
    """A terminal sends SIGINT to all processes of the group; `kill -INT` sends it to one."""
    running, workers = start_endless(python, endless(six), tmp_path, of_stream(settings))
    send = os.killpg if signals_group else os.kill
    send(running.pid, signal.SIGINT)
    ended = running.wait()
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.count("Traceback") == 1
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt")
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


SIGTERM = """
import os, signal
import wdskit

def same(sample):
    return sample

if __name__ == "__main__":
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    for other in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(other, lambda *_: None)
    pipe = wdskit.Pipeline().exact({folder!r}).to_tuple("cls").map(same).batched(3)
    loader = pipe.loader(workers=2, start_method={method!r})
    for number, _ in enumerate(loader):
        if number == 1:
            for other in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
                os.killpg(0, other)
            os.killpg(0, signal.SIGTERM)
    print(number + 1 == len(loader), received)
"""


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_sigterm_to_all_processes_of_a_job_leaves_it_to_the_main_process(six, tmp_path, start_method):
    """A cluster sends SIGTERM before it takes a machine: the rank still gets its batches, and can save its state."""
    folder = str(Path(six).parent)
    index_folder(folder, workers=1)
    script = tmp_path / "train.py"
    script.write_text(SIGTERM.format(folder=folder, method=start_method))
    settings: Any = {"capture_output": True, "text": True, "timeout": 60, "start_new_session": True}
    done = subprocess.run([sys.executable, script], check=False, **settings)
    assert (done.stdout, done.returncode) == ("True [1]\n", 0), done.stderr


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_workers_do_not_outlive_a_killed_main_process(python, six, tmp_path, start_method):
    running, workers = start_endless(python, endless(six), tmp_path, {"workers": 2, "start_method": start_method})
    descriptors = [os.pidfd_open(worker) for worker in workers]
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 30)[0], "the worker goes on without its main process"
        os.close(descriptor)


# --- errors of workers


class NeedsTwo(Exception):
    """An error that pickle cannot rebuild, because `args` has one argument too few."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Liar(Exception):
    def __reduce__(self):
        return (str, ("not me",))


class Thrower:
    """A user's stage that raises one of these errors at the sixth sample."""

    def __init__(self, err):
        self.err = err

    def __call__(self, source):
        for number, sample in enumerate(source):
            if number == 5:
                raise self.err
            yield int(sample["cls"])


ERRORS = [
    (KeyError("cls"), KeyError, "'cls'"),
    (ValueError("no", 1, b"bytes"), ValueError, "('no', 1, b'bytes')"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"), UnicodeDecodeError, "can't decode"),
    (ShardError(shard="a", offset=7, problem="p", remedy="r", samples_read=3), ShardError, "a, byte 7: p (3 samples"),
    (SampleError("m", stage="map", shard="a.tar", key="k"), SampleError, "m"),
    (StorageError("m", url="u"), StorageError, "m"),
    (DecodeError("m", field="f"), DecodeError, "m"),
    (NeedsTwo("one", "two"), PipelineError, "NeedsTwo: one and two"),
    (Liar("me"), PipelineError, "Liar: me"),
]


@pytest.mark.parametrize(("err", "kind", "text"), ERRORS, ids=lambda value: type(value).__name__)
def test_an_error_arrives_as_it_was_or_as_one_that_says_the_same(six, err, kind, text):
    """The error has its attributes, and the worker's traceback as its cause."""
    loader = split(six).stage(Thrower(err)).loader(workers=1, start_method="fork")
    seen = []
    with pytest.raises(kind) as caught:
        seen.extend(loader)
    assert seen == [0, 1, 2, 3, 4]
    assert type(caught.value) is kind
    assert text in str(caught.value)
    if kind is type(err):
        assert caught.value.__dict__ == err.__dict__
        assert caught.value.args == err.args
    assert type(caught.value.__cause__) is WorkerTraceback
    assert "worker 0:\n" in str(caught.value.__cause__)
    assert "test_faults.py" in str(caught.value.__cause__)


class Unpicklable(BaseException):
    """An error that raises when it is pickled and when it is printed."""

    def __init__(self):
        super().__init__(threading.Lock())

    def __str__(self):
        raise ValueError("no text")


class Elsewhere(BaseException):
    """An error whose pickle gives another type in another process."""

    def __reduce__(self):
        return make_elsewhere, (os.getpid(),)


def make_elsewhere(pid: int) -> Elsewhere:
    if pid != os.getpid():
        raise ImportError("there is no such module here")
    return Elsewhere()


UNUSUAL = {
    "cancelled": functools.partial(asyncio.CancelledError, "shut down"),
    "exit": functools.partial(SystemExit, "enough"),
    "interrupt": KeyboardInterrupt,
    "generator": GeneratorExit,
    "pytest": functools.partial(pytest.fail.Exception, "wrong"),
    "group": functools.partial(BaseException, "plain"),
    "unpicklable": Unpicklable,
    "elsewhere": Elsewhere,
}
"""Errors of user functions that are not an Exception, or cannot be pickled."""


def raise_unusual(flag: str, value: Any) -> Any:
    """Raise the error that the file names, for sample 5 or a batch with that sample."""
    numbers = np.atleast_1d(int(value["cls"]) if isinstance(value, dict) else value[0])
    if 5 in numbers and Path(flag).exists():
        make = UNUSUAL[Path(flag).read_text()]
        raise make()
    return numbers.tolist()


def unusual_pipe(kind: str, folder: Path, flag: Path) -> Pipeline:
    pattern = index_numbers(folder / "shards", [10, 10])
    function = functools.partial(raise_unusual, str(flag))
    source = split(pattern) if kind.startswith("stream") else Pipeline().sequential(pattern, tail="drop")
    if kind.endswith("batches"):
        return source.decode().to_tuple("cls").batched(4).map(function)
    return source.map(function).batched(4, collate=flat)


def flat(lists: list[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


CREWS = [(0, 1, None), (0, 2, None), (1, 1, "fork"), (1, 2, "forkserver"), (2, 2, "fork")]


@pytest.mark.parametrize(
    ("kind", "workers", "threads", "method"),
    [
        *(("planned", *crew) for crew in CREWS),
        *(
            ("stream", workers, 1, method)
            for workers, threads, method in CREWS
            if threads != 2 or method == "forkserver"
        ),
        ("planned batches", 1, 2, "fork"),
        ("stream batches", 1, 1, "fork"),
        ("planned", 1, 2, "spawn"),
    ],
)
def test_whatever_a_function_raises_arrives_and_the_next_epoch_works(tmp_path, kind, workers, threads, method):
    """Errors that are not an Exception, such as asyncio.CancelledError, keep their type. Nothing hangs or is left."""
    flag = tmp_path / "flag"
    pipe = unusual_pipe(kind, tmp_path, flag)
    gc.collect()
    before = open_things()
    loader = pipe.loader(workers=workers, threads=threads, start_method=method)
    for name, make in UNUSUAL.items():
        flag.write_text(name)
        wanted = type(make())
        if workers and name in {"unpicklable", "elsewhere", "pytest"}:  # errors of pytest have a wrong `__module__`
            wanted = PipelineError
        with pytest.raises(wanted) as caught:
            list(loader)
        assert type(caught.value) is wanted
        if workers:
            assert "raise_unusual" in str(caught.value.__cause__)
        if name in {"cancelled", "exit", "group"}:
            assert caught.value.args == make().args
        loader.set_epoch(0)
        del caught
    flag.unlink()
    assert sorted(flat(loader)) == list(range(20))
    assert loader.epoch == 1
    del loader
    gc.collect()
    assert not opened_since({name: before[name] for name in ("threads", "children")})


class Unsendable:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, sample):
        return sample


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", ["lambda", "local function", "lock", "stage"])
def test_what_cannot_reach_workers_is_refused_when_the_loader_is_made(six, start_method, kind):
    def local(sample):
        return sample

    functions = {"lambda": lambda sample: sample, "local function": local, "lock": Unsendable()}
    pipe = split(six).stage(local) if kind == "stage" else split(six).map(functions[kind])
    told = {"lambda": "<lambda>", "lock": "_thread.lock"}.get(kind, "<locals>.local")
    with pytest.raises(PipelineError, match=f"under '{start_method}': .*{told}.*\n  Define the function at the top"):
        pipe.loader(workers=1, start_method=start_method)
    assert len(list(pipe.loader(workers=1, start_method="fork"))) == 39
    assert len(list(pipe.loader(workers=0))) == 39


# --- the end of the program


AT_EXIT = """
import atexit, queue, threading, time
busy = threading.Lock()
atexit.register(lambda: print(busy.locked()))
import wdskit

def slow(sample):
    with busy:
        time.sleep(0.02)
    return sample

class Background(threading.Thread):
    def __init__(self, source):
        super().__init__(daemon=True)
        self.source, self.queue = source, queue.Queue()
        self.start()

    def run(self):
        for item in self.source:
            self.queue.put(item)

if __name__ == "__main__":
    thread = Background(wdskit.Pipeline().exact({folder!r}).map(slow).batched(3).loader(**{settings!r}))
    for _ in range(4):
        thread.queue.get()
    left = iter(wdskit.Pipeline().exact({folder!r}).batched(3).loader(**{settings!r}))
    next(left)
"""


CAPTURED = {"capture_output": True, "text": True, "timeout": 60}


@pytest.mark.parametrize("settings", [{"workers": 0}, *WAYS[:2]], ids=str)
def test_a_daemon_thread_and_a_loop_at_the_end_of_the_program_print_nothing(six, tmp_path, settings):
    """The iteration ends while the thread waits for a batch or makes it, and while a global has one of a loop."""
    folder = str(Path(six).parent)
    index_folder(folder, workers=1)
    script = tmp_path / "train.py"
    script.write_text(AT_EXIT.format(folder=folder, settings=settings))
    done = subprocess.run([sys.executable, script], check=False, **CAPTURED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_a_thread_that_outlives_the_main_thread_still_raises_its_errors(tmp_path):
    pack([{"__key__": f"{at:02}", "cls": at} for at in range(40)], tmp_path / "d", max_samples=20)
    with (tmp_path / "d" / "d-000001.tar").open("r+b") as file:
        file.seek(10 << 10)
        file.write(b"zz")
    script = tmp_path / "train.py"
    start = "    thread = Background(wdskit.Pipeline().sequential('d').batched(4).loader(workers=0))\n"
    text = AT_EXIT.partition("    thread = ")[0].replace("daemon=True", "daemon=False")
    script.write_text(text.replace("self.queue.put(item)", "threading.main_thread().join()") + start)
    done = subprocess.run([sys.executable, script], check=False, cwd=tmp_path, **CAPTURED)
    assert "ShardError: " in done.stderr


# --- leaks


ENDS = {
    "with_epoch": lambda six: split(six).shuffle(5).map(number_of).with_epoch(9),
    "a pass": lambda six: split(six).map(number_of).shuffle(5),
    "an error": lambda six: split(six).shuffle(5).map(fail_on_7).with_epoch(39),
    "a planned epoch": lambda six: planned(six).map(number_of).with_epoch(9),
    "an error of a planned source": lambda six: planned(six).map(fail_on_7),
}


@pytest.mark.parametrize("settings", WAYS, ids=str)
@pytest.mark.parametrize("end", ENDS)
def test_a_dropped_loader_leaves_nothing(six, end, settings):
    make = functools.partial(ENDS[end](six).loader, **(settings if "planned" in end else of_stream(settings)))
    if leftovers(make):  # the first loader of a process also starts permanent parts of torch and multiprocessing
        assert leftovers(make) == {}


def test_the_check_of_leftovers_catches_an_error_that_holds_its_loader(six, monkeypatch):
    """An error refers to its frames, and the frames to the error: a cycle."""

    def result(self):
        error = self.error
        if error is not None:
            raise error
        return self.value

    monkeypatch.setattr(Outcome, "result", result)
    left = leftovers(lambda: ENDS["an error of a planned source"](six).loader(workers=1), limit_s=1)
    assert left.keys() >= {"loader", "children", "files"}


# --- kept batches, cancelled jobs, forks, hangs


def wide(sample: dict[str, Any]) -> torch.Tensor:
    return torch.full((1024,), int(sample["cls"]))  # 8 KiB, too large to be sent through a pipe


@pytest.mark.parametrize("threads", [1, 2])
def test_batches_that_are_kept_hold_no_descriptor(tmp_path, threads):
    """A consumer that keeps 1,000 batches would exhaust its descriptors."""
    index_numbers(tmp_path, [300])
    loader = Pipeline().exact(str(tmp_path)).map(wide).batched(4).loader(workers=1, threads=threads)
    before = open_things()["files"]
    kept = list(loader)
    assert len(kept) == 75
    assert open_things()["files"] - before < 10
    assert sorted(int(number) for batch in kept for number in batch[:, 0]) == list(range(300))


@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (0, 2)])
def test_a_forked_process_is_refused_and_the_other_goes_on(tmp_path, workers, threads):
    index_numbers(tmp_path, [200])
    pipe = Pipeline().exact(str(tmp_path), seed=1).map(number_of).batched(2)
    expected = [batch.tolist() for batch in pipe.loader(workers=0)]
    items = iter(pipe.loader(workers=workers, threads=threads))
    found = [next(items).tolist() for _ in range(5)]
    child = os.fork()
    if child == 0:
        try:
            next(items)
        except PipelineError as err:
            os._exit(7 if "from which this one was forked" in str(err) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert found + [batch.tolist() for batch in items] == expected


def hang(sample: dict[str, Any]) -> int:
    select.select([], [], [], 1000)
    return int(sample["cls"])


def test_a_loader_ends_while_its_worker_hangs_however_many_jobs_wait(tmp_path):
    """There are more jobs than its pipe holds: nothing may wait until the worker reads them."""
    index_numbers(tmp_path, [3000])
    loader = Pipeline().exact(str(tmp_path)).map(hang).batched(1).loader(workers=1, threads=1, prefetch=2000)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 2)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    del loader
    gc.collect()
    assert multiprocessing.active_children() == []


def fails_of_three(sample: dict[str, Any]) -> int:
    number = int(sample["cls"])
    if number in {1, 5, 6}:
        raise ValueError(number)
    return number


def test_a_batch_that_the_budget_refuses_is_not_counted(tmp_path):
    """The state is that of the received batches; with a larger budget it can be resumed."""
    index_numbers(tmp_path / "data", [20])
    pipe = Pipeline().sequential(str(tmp_path / "data")).map(fails_of_three).batched(4)

    def make(max_bad: int) -> Any:
        return pipe.loader(workers=0, errors={"max_bad": max_bad, "transforms": True, "dir": str(tmp_path)})

    loader = make(2)
    with pytest.raises(SampleError, match=r"Epoch 0 has 3 bad samples on rank 0 so far, and errors\.max_bad allows 2"):
        list(loader)
    state = loader.state_dict()
    assert (state["consumed"], state["bad"]) == (4, 1)
    loader = make(3)
    loader.load_state_dict(state)
    assert len(list(loader)) == 4
    assert len((tmp_path / "bad-pipeline-rank00000.jsonl").read_text().splitlines()) == 3
