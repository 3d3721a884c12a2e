"""What a training program makes of its hardware: which kernels it runs, what it hides, how fast its host launches.

Hardware alone does not determine a step's time. The same layer on the same devices takes twice as long under one
program as under another, because one launches 40 small operators from Python and the other 12. `catalogue.toml` has the
programs of published measurements; each figure has its source or its fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.cluster.sizes import EAGER, FLOAT32, Formats, Kernels

if TYPE_CHECKING:
    from paceline.cluster.links import Network


# A piece whose values between products have fewer bytes a micro-batch cuts no sequence. A block then exchanges four
# times a step in place of nine, or of eleven where its neighbours cut none, and computes its norms and residual sums
# whole. An estimate: seven exchanges take a host about 0.4 ms, in which an H100 does the products of a block of width
# 1024 at this size, shared by two ranks (72 x bytes / 2 x width / ranks operations in bf16).
SEQUENCE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Software:
    """One training program on accelerators.

    product_rate: part of an accelerator's best matrix-product rate that large products inside a model reach.
    convolution_rate, small_convolution_rate: part of the same that convolutions reach; those of 3x3 and 5x5 have
        algorithms with fewer multiplications, and may be above 1.
    attention_rate: part of an accelerator's best rate of fused attention; above 1 for later kernels.
    skips_mask: whether fused attention leaves out what the causal mask hides.
    fuses_float8: whether, in fp8, one kernel rounds a value, and gradients of weights are computed in float8 too.
    memory_rate: part of the memory bandwidth that elementwise kernels reach.
    operator_s: host seconds to launch an operator, with Python's and autograd's work around it.
    collective_s: host seconds to launch a collective.
    kernel_s: device seconds that a kernel takes at least.
    microbatch_s, step_s: host seconds of a micro-batch and of a step that no operator accounts for.
    hook_s: host seconds around a gathering or a reduction of a sharded unit.
    stops_recomputing: whether a second forward of recompute=full ends with the last tensor that backward needs.
    roll_call: whether CPU ranks that share parameters compare which unit comes next.
    slowdown: by how much computing is slower beside a collective, as a part.
    sequence_parallel: whether ranks of a tensor axis cut activations between layers along the sequence.
    cut_sequence_bytes: a sample's bytes from which they cut what lies between layers even so, but keep gathered inputs
        of products whole.
    hidden_exchange: part of the tensor axis' exchanges that computing hides.
    link_rate, network_rate: part of what links in a node, and across nodes, carry that its collectives reach.
    device_bytes_per_s, node_bytes_per_s: the most that its collectives send from a device within a node, and from a
        node, where that is less: copies through the host's memory, sockets.
    process_bytes_per_s, process_latency_s: what a worker's or a server's process sends or takes through its host's
        memory, and what each message waits there.
    overlaps: whether gradients travel while backward goes on.
    prefetches: whether sharded parameters are gathered while the unit before is computed.
    cuts_messages: whether each rank of a tensor axis sends the next stage its part alone.
    waits_for_sends: whether a stage waits until what it sends has arrived.
    update_passes: how often the optimizer moves its bytes, scaling and clipping included.
    context_bytes: of a device before the first tensor: the driver's, the kernels' and the collectives' buffers.
    reserved: bytes that the allocator takes from the device a byte of tensors.
    spread: how far measured steps lie around predicted ones: 80 % within this part of the logarithm.
    kernels, formats: of the models it trains.
    """

    name: str = "paceline"
    product_rate: float = 0.9
    convolution_rate: float = 0.8
    small_convolution_rate: float = 1.2
    attention_rate: float = 1.0
    skips_mask: bool = True
    fuses_float8: bool = False
    memory_rate: float = 0.8
    operator_s: float = 10e-6
    collective_s: float = 0.0
    kernel_s: float = 3e-6
    microbatch_s: float = 0.0
    step_s: float = 0.0
    hook_s: float = 200e-6
    stops_recomputing: bool = False
    roll_call: bool = False
    slowdown: float = 0.1
    sequence_parallel: bool = False
    cut_sequence_bytes: float = float("inf")
    hidden_exchange: float = 0.0
    link_rate: float = 1.0
    network_rate: float = 1.0
    device_bytes_per_s: float = float("inf")
    node_bytes_per_s: float = float("inf")
    process_bytes_per_s: float = float("inf")
    process_latency_s: float = 0.0
    overlaps: bool = True
    prefetches: bool = True
    cuts_messages: bool = True
    waits_for_sends: bool = False
    update_passes: float = 1.0
    context_bytes: float = 1.0e9
    reserved: float = 1.0
    spread: float = 0.2
    kernels: Kernels = EAGER
    formats: Formats = FLOAT32

    def on(self, network: Network) -> Network:
        """A network as this program's collectives find it."""
        inside = replace(
            network.inside,
            bytes_per_s=min(network.inside.bytes_per_s * self.link_rate, self.device_bytes_per_s),
        )
        across = network.across and replace(
            network.across,
            bytes_per_s=min(
                network.across.bytes_per_s * self.network_rate,
                self.node_bytes_per_s / network.devices_per_node,
            ),
        )
        return replace(
            network,
            inside=inside,
            across=across,
            process_bytes_per_s=self.process_bytes_per_s,
            process_latency_s=self.process_latency_s,
        )

    @property
    def convolution_rates(self) -> dict[str, float]:
        """By the kind of a product."""
        return {
            "convolution": self.convolution_rate,
            "small convolution": self.small_convolution_rate,
        }


# Where each figure is from, and which are assumed: docs/formulas.md, "Programs". Of servers: sockets with a thread for
# each worker carry 4.1 to 4.7 GB/s between processes of one host, and a small
# message between two takes 0.1 ms; see docs/formulas.md.
PACELINE = Software(
    stops_recomputing=True,
    roll_call=True,
    microbatch_s=0.6e-3,
    process_bytes_per_s=4.4e9,
    process_latency_s=1e-4,
    cut_sequence_bytes=SEQUENCE_BYTES,
)
