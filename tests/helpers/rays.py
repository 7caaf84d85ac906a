"""Stand-ins for Ray: one that runs tasks, and one that runs actors."""

from __future__ import annotations

import contextlib
import pickle
import threading
import types
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class ActorDiedError(RayError):
    pass


class ObjectLostError(RayError):
    pass


class Connection(types.ModuleType):
    """The calls that begin and end a connection. Addresses in `unreachable` have no cluster."""

    unreachable = ("auto", "ray://nobody:1")

    def __init__(self) -> None:
        super().__init__("ray")
        self.calls: list[Any] = []
        self.options: dict[str, Any] = {}
        self.connected = False

    def is_initialized(self):
        return self.connected

    def init(self, **options):
        self.calls.append(("init", options["address"]))
        if options["address"] in self.unreachable:
            raise ConnectionError("Could not find any running Ray instance.")
        self.connected = True

    def shutdown(self):
        self.calls.append("shutdown")
        self.connected = False

    def get_runtime_context(self):
        number = sum(isinstance(call, tuple) and call[0] == "init" for call in self.calls)
        return types.SimpleNamespace(get_job_id=lambda: f"job{number}")


class FakeRay(Connection):
    """The calls of Ray that packing uses. A task runs when its result is requested, on copies, as on another machine.

    `deaths` has how many times the worker of each shard dies; `die` is called before each death.
    """

    unreachable = ("ray://nobody:1",)

    def __init__(self) -> None:
        super().__init__()
        self.exceptions = types.SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.deaths: dict[str, int] = {}
        self.die = lambda job, *words: None
        self.run = lambda function, *words: function(*words)

    def cluster_resources(self):
        return {"CPU": 2.0}

    def remote(self, **options):
        self.options = options
        return lambda function: types.SimpleNamespace(remote=lambda *words: pickle.dumps((function, *words)))

    def get(self, ref):
        function, job, *words = pickle.loads(ref)
        for _ in range(1 + self.options["max_retries"]):
            if not self.deaths.get(job.name):
                return pickle.loads(pickle.dumps(self.run(function, job, *words)))
            self.deaths[job.name] -= 1
            self.die(job, *words)
        raise RayError("The worker died unexpectedly.\n")

    def cancel(self, ref, *, force):
        assert force
        self.calls.append(("cancel", pickle.loads(ref)[1].name))

    def wait(self, refs, *, num_returns, timeout):
        assert len(refs) == num_returns
        self.calls.append("wait")


class FakeCluster(Connection):
    """The calls of Ray that a loader uses. Actors are threads of this process. Values are copied, as on another
    machine, and the arrays in a result are read-only.

    Attributes:
        num_cpus: CPUs of the cluster. Actors without a CPU wait.
        living: The actors that have not been killed.
        before: Called with an actor and the name of a method before the method runs. A RayError that it raises ends the
            process of the actor, which starts again, except for `ObjectLostError` and `RayTaskError`.
    """

    def __init__(self, num_cpus: int = 64) -> None:
        super().__init__()
        kinds = (RayError, RayTaskError, ObjectLostError)
        self.exceptions = types.SimpleNamespace(**{kind.__name__: kind for kind in kinds})
        self.cloudpickle = pickle
        self.num_cpus = num_cpus
        self.living: list[FakeActor] = []
        self.pools: list[ThreadPoolExecutor] = []
        self.num_started = 0
        self.before: Callable[[FakeActor, str], None] = lambda actor, method: None

    def shutdown(self):
        for actor in [*self.living]:
            self.kill(actor)
        super().shutdown()

    def cluster_resources(self):
        return {"CPU": float(self.num_cpus)}

    def available_resources(self):
        return {"CPU": float(self.num_cpus - len([actor for actor in self.living if actor.has_cpu]))}

    def put(self, value):
        return value

    def remote(self, **options):
        self.options = options
        return lambda kind: types.SimpleNamespace(remote=lambda *given: FakeActor(self, kind, given))

    def kill(self, actor):
        actor.end(is_killed=True)


class FakeMethod:
    """A method of a handle. With `max_task_retries`, a call is repeated if the process of the actor dies."""

    def __init__(self, actor: FakeActor, name: str, num_retries: int = 0) -> None:
        self.actor, self.name, self.num_retries = actor, name, num_retries

    def options(self, *, max_task_retries: int) -> FakeMethod:
        return FakeMethod(self.actor, self.name, max_task_retries)

    def remote(self, *given: Any) -> Any:
        return self.actor.call(self, pickle.dumps(given))


class FakeActor:
    """A handle and its actor, which runs `max_concurrency` calls at a time. It starts again when it dies."""

    def __init__(self, cluster: FakeCluster, kind: Any, given: tuple[Any, ...]) -> None:
        self.cluster, self.given = cluster, pickle.dumps((kind, given))
        self.number, cluster.num_started = cluster.num_started, cluster.num_started + 1
        self.has_cpu = cluster.available_resources()["CPU"] >= 1
        self.lock = threading.Lock()
        self.is_killed, self.num_starts = False, 0
        self.start()
        cluster.living.append(self)

    def start(self) -> None:
        self.pool = ThreadPoolExecutor(self.cluster.options["max_concurrency"])
        self.cluster.pools.append(self.pool)
        self.pending: dict[Future[Any], tuple[FakeMethod, bytes]] = {}
        kind, given = pickle.loads(self.given)
        self.actor = kind(*given)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return FakeMethod(self, method)

    def call(self, method: FakeMethod, given: bytes) -> Any:
        if not self.cluster.connected:  # as Ray, in the thread that calls
            raise Exception("Failed to submit task to actor.\nCan't find actor.")  # noqa: TRY002
        future: Future[Any] = Future()
        with self.lock:
            if self.is_killed:
                future.set_exception(ActorDiedError("The actor is dead."))
            else:
                self.send(future, method, given)
        return types.SimpleNamespace(future=lambda: future)

    def send(self, future: Future[Any], method: FakeMethod, given: bytes) -> None:
        self.pending[future] = method, given
        if self.has_cpu:
            self.pool.submit(self.run, future, self.actor, method.name, given)

    def run(self, future: Future[Any], actor: Any, method: str, given: bytes) -> None:
        try:
            self.cluster.before(self, method)
            value = getattr(actor, method)(*pickle.loads(given))
            buffers: list[pickle.PickleBuffer] = []
            pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
            copies = [bytes(buffer.raw()) for buffer in buffers]
            del value, buffers
            outcome = pickle.loads(pickled, buffers=copies)
        except ObjectLostError as err:
            self.settle(future, error=err)
        except RayTaskError as err:
            self.settle(future, error=err)
        except RayError:
            self.end()
        except Exception as err:  # noqa: BLE001
            self.settle(future, error=RayTaskError(repr(err)))
        else:
            self.settle(future, outcome)

    def settle(self, future: Future[Any], value: Any = None, error: Exception | None = None) -> None:
        with self.lock:
            if self.pending.pop(future, None) is None:  # the process has ended meanwhile
                return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def end(self, *, is_killed: bool = False) -> None:
        """End the process of the actor. Unless it is killed for good, start it again, and repeat calls with retries."""
        with self.lock:
            lost, old = self.pending, self.pool
            self.num_starts += 1
            self.is_killed = self.is_killed or is_killed or self.num_starts > self.cluster.options["max_restarts"]
            self.pending = {}
            if not self.is_killed:
                self.start()
                for future, (method, given) in lost.items():
                    if method.num_retries:
                        self.send(future, method, given)
                lost = {future: call for future, call in lost.items() if future not in self.pending}
            else:
                with contextlib.suppress(ValueError):  # another thread has ended it
                    self.cluster.living.remove(self)
        for future in lost:
            future.set_exception(ActorDiedError("The actor died unexpectedly."))
        old.shutdown(wait=False)
