"""The workloads' layers in TensorFlow: the arithmetic of `workloads/layers.py`, name by name.

Each function takes torch's parameters under torch's names, as tensors in torch's shapes, and makes
the mean loss of the rows and of what else there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from benchmarks.workloads.workload import pieces

Parameters = Mapping[str, Any]
Layers = Callable[[Parameters, list[Any], list[Any]], Any]


def by_workload(name: str) -> Layers:
    kind = name.partition("-")[0]
    layers = {
        "lm": sampled_words,
        "nmt": translation,
        "dlrm": interaction,
        "sparsity": square,
    }
    if kind not in layers:
        raise NotImplementedError(f"workload {name!r} has no layers in TensorFlow")
    return layers[kind]


def emulated(forward: Any, backward: Any) -> Layers:
    """Layers on an emulated accelerator, in pieces, as `workloads.model.Accelerated` has them.

    A piece takes as long as the next of `forward` takes to come, and then of `backward`.
    """

    @tf.custom_gradient
    def compute(*inputs: Any) -> Any:
        with tf.control_dependencies(inputs), tf.control_dependencies([next(forward)]):
            loss = tf.identity(inputs[0])

        def gradients(upstream: Any) -> Any:
            with tf.control_dependencies([upstream]), tf.control_dependencies([next(backward)]):
                return [tf.fill(tf.shape(x), 1e-4) for x in inputs]

        return loss, gradients

    def layers(parameters: Parameters, rows: list[Any], others: list[Any]) -> Any:
        entering, loss = rows, tf.zeros([])
        for piece in pieces(list(parameters.values()), lambda value: value.shape.num_elements()):
            loss = compute(loss, *entering, *piece)
            entering = []
        return loss

    return layers


def sleeping(seconds: float) -> Any:
    """Sleeps before each element. Python cannot sleep in a remote function, a dataset can."""
    options = tf.data.Options()  # Or it would run ahead, and sleep while nobody waits for it.
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    endless = tf.data.Dataset.range(1).repeat().apply(testing.sleep(round(seconds * 1e6)))
    return endless.with_options(options)


def sampled_words(p: Parameters, rows: list[Any], others: list[Any]) -> Any:
    embedded, looked_up = rows
    states = _linear(p, "projection", _lstm(p, embedded))
    states = tf.reshape(states, [-1, embedded.shape[2]])
    targets, candidates = looked_up[: states.shape[0]], looked_up[states.shape[0] :]
    of_target = tf.reduce_sum(states * targets, 1, keepdims=True)
    logits = tf.concat([of_target, tf.matmul(states, candidates, transpose_b=True)], 1)
    return tf.reduce_mean(tf.reduce_logsumexp(logits, 1) - tf.squeeze(of_target, 1))


def _lstm(p: Parameters, x: Any) -> Any:
    """Torch's order of the gates, and its two biases."""
    hidden = state = tf.zeros([x.shape[0], p["lstm.weight_hh_l0"].shape[1]])
    of_inputs = _times(x, p["lstm.weight_ih_l0"]) + p["lstm.bias_ih_l0"] + p["lstm.bias_hh_l0"]
    outputs = []
    for of_input in tf.unstack(of_inputs, axis=1):
        gates = of_input + _times(hidden, p["lstm.weight_hh_l0"])
        inlet, keep, new, outlet = tf.split(gates, 4, 1)
        state = tf.sigmoid(keep) * state + tf.sigmoid(inlet) * tf.tanh(new)
        hidden = tf.sigmoid(outlet) * tf.tanh(state)
        outputs.append(hidden)
    return tf.stack(outputs, 1)


def translation(p: Parameters, rows: list[Any], others: list[Any]) -> Any:
    memory, x = rows
    for prefix in _numbered(p, "transformer.encoder.layers"):
        memory = _norm(p, f"{prefix}.norm1", memory + _attend(p, f"{prefix}.self_attn", memory))
        memory = _norm(p, f"{prefix}.norm2", memory + _feed_forward(p, prefix, memory))
    memory = _norm(p, "transformer.encoder.norm", memory)
    for prefix in _numbered(p, "transformer.decoder.layers"):
        x = _norm(p, f"{prefix}.norm1", x + _attend(p, f"{prefix}.self_attn", x))
        x = _norm(p, f"{prefix}.norm2", x + _attend(p, f"{prefix}.multihead_attn", x, memory))
        x = _norm(p, f"{prefix}.norm3", x + _feed_forward(p, prefix, x))
    logits = _linear(p, "out", _norm(p, "transformer.decoder.norm", x))
    return _cross_entropy(logits, others[0])


def _attend(p: Parameters, prefix: str, x: Any, memory: Any = None, heads: int = 4) -> Any:
    weights = tf.split(p[f"{prefix}.in_proj_weight"], 3)
    biases = tf.split(p[f"{prefix}.in_proj_bias"], 3)
    inputs = (x, *2 * (x if memory is None else memory,))
    queries, keys, values = (
        tf.transpose(tf.reshape(_times(y, w) + b, [*y.shape[:2], heads, -1]), [0, 2, 1, 3])
        for y, w, b in zip(inputs, weights, biases, strict=True)
    )
    scores = tf.matmul(queries, keys, transpose_b=True) * queries.shape[-1] ** -0.5
    together = tf.transpose(tf.matmul(tf.nn.softmax(scores), values), [0, 2, 1, 3])
    return _linear(p, f"{prefix}.out_proj", tf.reshape(together, x.shape))


def _feed_forward(p: Parameters, prefix: str, x: Any) -> Any:
    return _linear(p, f"{prefix}.linear2", tf.nn.relu(_linear(p, f"{prefix}.linear1", x)))


def interaction(p: Parameters, rows: list[Any], others: list[Any]) -> Any:
    dense, clicked = others
    bottom = tf.nn.relu(_linear(p, "bottom.2", tf.nn.relu(_linear(p, "bottom.0", dense))))
    vectors = tf.stack([bottom, *rows], 1)
    products = tf.matmul(vectors, vectors, transpose_b=True)
    flat = tf.reshape(products, [products.shape[0], -1])
    first, second = np.triu_indices(vectors.shape[1], 1)
    pairs = tf.gather(flat, first * vectors.shape[1] + second, axis=1)
    top = tf.nn.relu(_linear(p, "top.0", tf.concat([bottom, pairs], 1)))
    logits = tf.squeeze(_linear(p, "top.2", top), 1)
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(clicked, logits))


def square(p: Parameters, rows: list[Any], others: list[Any]) -> Any:
    return tf.reduce_mean(tf.square(_linear(p, "linear", rows[0])))


def _times(x: Any, weight: Any) -> Any:
    """By a matrix as torch keeps it."""
    flat = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), weight, transpose_b=True)
    return tf.reshape(flat, [*x.shape[:-1], weight.shape[0]])


def _linear(p: Parameters, prefix: str, x: Any) -> Any:
    return _times(x, p[f"{prefix}.weight"]) + p[f"{prefix}.bias"]


def _norm(p: Parameters, prefix: str, x: Any) -> Any:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    weight, bias = p[f"{prefix}.weight"], p[f"{prefix}.bias"]
    return tf.nn.batch_normalization(x, mean, variance, bias, weight, 1e-5)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def _numbered(p: Parameters, prefix: str) -> list[str]:
    """`prefix.0`, `prefix.1`, … as far as there are parameters of them."""
    depth = prefix.count(".") + 2
    names = (".".join(name.split(".")[:depth]) for name in p if name.startswith(f"{prefix}."))
    return list(dict.fromkeys(names))
