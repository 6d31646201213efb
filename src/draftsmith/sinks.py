"""Where metrics go besides metrics.jsonl: W&B, TensorBoard, trackio and MLflow, each optional and each offline.

A sink is fed from a queue of its own by a thread of its own: one that raises or hangs loses records, which are counted
and said at the end, and never stops or slows the run.  Everything is written below `tracking/` in the run's folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from draftsmith import env
from draftsmith.errors import InputError
from draftsmith.provenance.masking import masker
from draftsmith.rundir import RunDir

QUEUE = 4096
"""Records that may wait for a sink; beyond, they are dropped."""
CLOSE_SECONDS = 20.0
"""How long the end of a run waits for all sinks together."""
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio", "mlflow": "mlflow"}


class Sink(Protocol):
    def write(self, step: int, when: float, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Fed:
    """One sink, opened, fed and closed by a daemon thread."""

    def __init__(self, name: str, make: Callable[[], Sink], size: int = QUEUE) -> None:
        self.name, self.make = name, make
        self.queue: queue.Queue[tuple[int, float, Mapping[str, float]] | None] = queue.Queue(size)
        self.given, self.written, self.failure = 0, 0, ""
        self.thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self.thread.start()

    def feed(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """Never waits."""
        self.given += 1
        with contextlib.suppress(queue.Full):  # given and not written: counted at the end
            self.queue.put_nowait((step, when, values))

    def _work(self) -> None:
        try:
            sink = self.make()
            while (item := self.queue.get()) is not None:
                sink.write(*item)
                self.written += 1
            sink.close()
        except Exception as error:  # whatever a tracker raises, the run goes on without it
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]

    def ask_to_close(self) -> None:
        with contextlib.suppress(queue.Full):  # it hangs, or will not get through in time
            self.queue.put_nowait(None)

    def problem(self, deadline: float) -> str | None:
        """After ask_to_close: what went wrong, in one line; None if every record arrived."""
        self.thread.join(max(0.0, deadline - time.monotonic()))
        lost = self.given - self.written
        if self.failure:
            why = f"it failed ({self.failure})"
        elif self.thread.is_alive():
            why = "it did not answer"
        elif lost:
            why = "its queue was full, or its thread ended"
        else:
            return None
        return f"tracking.{self.name}: {why}: {lost} of {self.given} records dropped; all are in metrics.jsonl"


class Sinks:
    """All sinks of a run.  Read by Tracker."""

    def __init__(self, makers: Mapping[str, Callable[[], Sink]], close_seconds: float = CLOSE_SECONDS) -> None:
        self.fed = [Fed(name, make) for name, make in makers.items()]
        self.close_seconds = close_seconds

    def record(self, step: int, when: float, values: Mapping[str, Any]) -> None:
        if self.fed:
            numbers = dict(flat(values))
            for fed in self.fed:
                fed.feed(step, when, numbers)

    def close(self) -> list[str]:
        """What is to be said about sinks that did not get everything."""
        deadline = time.monotonic() + self.close_seconds
        for fed in self.fed:
            fed.ask_to_close()
        return [said for fed in self.fed if (said := fed.problem(deadline))]


def flat(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers only, named kind/key, kind/key/part, kind/key/1, 2 ... for slots."""
    kind = values.get("kind")

    def walk(name: str, value: Any) -> Iterator[tuple[str, float]]:
        if isinstance(value, bool) or value is None:
            return
        if isinstance(value, (int, float)):
            yield name, float(value)
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                yield from walk(f"{name}/{key}", inner)
        elif isinstance(value, (list, tuple)):
            for number, inner in enumerate(value, 1):
                yield from walk(f"{name}/{number}", inner)

    for key, value in values.items():
        if key != "kind":
            yield from walk(f"{kind}/{key}" if kind else key, value)


def check(wanted: Sequence[str]) -> None:
    """Raises InputError for a sink whose package is not installed."""
    for name in wanted:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise InputError(
                f"tracking.{name}=true needs the package {PACKAGES[name]}: pip install 'draftsmith[tracking]', or set "
                f"tracking.{name}=false"
            )


def open_sinks(wanted: Sequence[str], run: RunDir, config: Mapping[str, Any]) -> Sinks:
    """The sinks that the config's `tracking` section names.  The libraries are imported in the sinks' own threads."""
    kinds: dict[str, Callable[[RunDir, Mapping[str, Any]], Sink]] = {
        "wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio, "mlflow": MLflow,
    }  # fmt: skip
    if wanted:
        env.offline_tracking(run.tracking)
        config = masker().tree(dict(config), by_name=True)  # it leaves this machine when it is synced
    return Sinks({name: partial(kinds[name], run, config) for name in wanted})


def label(run: RunDir) -> str:
    return f"{run.path.parent.name}-{run.path.name}"


class Wandb:
    """`wandb sync tracking/wandb/offline-run-*` uploads it later."""

    def __init__(self, run: RunDir, config: Mapping[str, Any]) -> None:
        wandb: Any = import_module("wandb")
        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        self.run = wandb.init(
            mode="offline", dir=str(run.tracking), project="draftsmith", name=label(run), config=dict(config),
            settings=quiet,
        )  # fmt: skip

    def write(self, step: int, when: float, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """`tensorboard --logdir tracking/tensorboard`."""

    def __init__(self, run: RunDir, config: Mapping[str, Any]) -> None:
        self.writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(str(run.tracking / "tensorboard"))
        self.writer.add_text("config", f"```\n{json.dumps(config, indent=1)}\n```")

    def write(self, step: int, when: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, walltime=when)

    def close(self) -> None:
        self.writer.close()


class Trackio:
    """`TRACKIO_DIR=.../tracking/trackio trackio show`."""

    def __init__(self, run: RunDir, config: Mapping[str, Any]) -> None:
        trackio: Any = import_module("trackio")
        self.run = trackio.init(
            project="draftsmith", name=label(run), config=dict(config), embed=False, auto_log_gpu=False,
            auto_log_cpu=False,
        )  # fmt: skip

    def write(self, step: int, when: float, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """`MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri tracking/mlflow`."""

    def __init__(self, run: RunDir, config: Mapping[str, Any]) -> None:
        mlflow: Any = import_module("mlflow")
        self.client = mlflow.MlflowClient(tracking_uri=(run.tracking / "mlflow").absolute().as_uri())
        experiment = self.client.create_experiment("draftsmith")
        self.id = self.client.create_run(experiment, run_name=label(run)).info.run_id
        self.metric: Any = import_module("mlflow.entities").Metric
        self.client.log_dict(self.id, dict(config), "config.json")

    def write(self, step: int, when: float, values: Mapping[str, float]) -> None:
        self.client.log_batch(self.id, [self.metric(k, v, int(when * 1e3), step) for k, v in values.items()])

    def close(self) -> None:
        self.client.set_terminated(self.id)
