"""TensorFlow's ParameterServerStrategy: a coordinator schedules steps on workers, which read and update variables.

It is asynchronous only.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

from benchmarks.contenders.servers.work import (
    BATCH,
    LOSSES,
    LR,
    WARM_UP_UPDATES,
    data,
    initial_weights,
    report,
)


def serve() -> None:
    """A worker or a parameter server, as TF_CONFIG says, until it is ended."""
    import tensorflow as tf

    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.distribute.Server(
        cluster.cluster_spec(),
        job_name=cluster.task_type,
        task_index=cluster.task_id,
        protocol="grpc",
        config=_one_thread(tf),
    ).join()


def _one_thread(tf: Any) -> Any:
    """For computing, as all contenders have it."""
    return tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)


def coordinate(updates: int) -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        layers = [(tf.Variable(weight), tf.Variable(bias)) for weight, bias in initial_weights()]

    def samples() -> Any:
        x, target = data()
        return (
            tf.data.Dataset.from_tensor_slices((x, target))
            .shuffle(len(x))
            .repeat()
            .batch(BATCH)
            .prefetch(2)
        )

    @tf.function
    def step(batches: Any) -> Any:
        x, target = next(batches)
        variables = [variable for layer in layers for variable in layer]
        with tf.GradientTape() as tape:
            values = [
                (tf.convert_to_tensor(weight), tf.convert_to_tensor(bias))
                for weight, bias in layers
            ]
            for weight, bias in values[:-1]:
                x = tf.nn.relu(x @ weight + bias)
            weight, bias = values[-1]
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(target, x @ weight + bias)
            )
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(LR * gradient)
        return loss

    batches = iter(coordinator.create_per_worker_dataset(lambda: samples()))

    def run(count: int) -> list[Any]:
        losses = [coordinator.schedule(step, args=(batches,)) for _ in range(count)]
        coordinator.join()
        return losses

    run(WARM_UP_UPDATES)
    began_s = time.perf_counter()
    losses = run(updates)
    spent_s = time.perf_counter() - began_s
    report(BATCH * updates / spent_s, [float(loss.fetch()) for loss in losses[-LOSSES:]])
    os._exit(0)  # its threads would wait for processes that are ended


def main(updates: int, workers: int) -> None:
    counts = {"chief": 1, "worker": workers, "ps": 1}
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(sum(counts.values()))]
    free = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    for sock in sockets:
        sock.close()
    cluster = {role: [free.pop() for _ in range(count)] for role, count in counts.items()}
    quiet = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "no_grpc_proxy": "127.0.0.1",
    }
    processes = []
    for role, count in counts.items():
        for number in range(count):
            place = {
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": role, "index": number}}
                )
            }
            command = [
                sys.executable,
                "-m",
                __spec__.name,
                "--updates",
                str(updates),
                "--role",
                role,
            ]
            processes.append(subprocess.Popen(command, env={**quiet, **place}))
    try:
        raise SystemExit(processes[0].wait())
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--role")
    options = parser.parse_args()
    if options.role is None:
        main(options.updates, options.workers)
    elif options.role == "chief":
        coordinate(options.updates)
    else:
        serve()
