"""The properties of a training program that decide how it uses its hardware.

Examples are the kernels that it runs, the communication that it overlaps, and the time of its host
for a launch.

Hardware alone does not determine a step's time. The same layer on the same devices takes twice as
long under one program as under another, because one launches 40 small operators from Python and the
other 12. `benchmarks/models` has the programs of published measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.cluster.links import Network


# If the values between a piece's products have fewer bytes in a micro-batch, the piece does not cut
# the sequence. A block then exchanges four times a step in place of nine, or of eleven if its
# neighbours do not cut either, and computes its norms and residual sums whole. The figure is an
# estimate: seven exchanges take a host about 0.4 ms, in which an H100 does the products of a block
# of width 1024 at this size, shared by two ranks (72 x bytes / 2 x width / ranks operations in
# bf16).
SEQUENCE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Software:
    """One training program on accelerators."""

    name: str = "paceline"
    # The part of an accelerator's best matrix-product rate that large products inside a model
    # reach.
    product_rate: float = 0.9
    # The part of the same rate that convolutions reach, and that those of 3x3 and 5x5 reach. The
    # latter have algorithms with fewer multiplications, so their part may be above 1.
    convolution_rate: float = 0.8
    small_convolution_rate: float = 1.2
    # The part of an accelerator's best rate of fused attention; above 1 for later kernels.
    attention_rate: float = 1.0
    skips_mask: bool = True  # whether fused attention leaves out what the causal mask hides
    # Whether, in fp8, one kernel rounds a value, and gradients of weights are computed in float8
    # too.
    fuses_float8: bool = False
    memory_rate: float = 0.8  # the part of the memory bandwidth that elementwise kernels reach
    # Host seconds to launch an operator, with Python's and autograd's work around it.
    operator_s: float = 10e-6
    collective_s: float = 0.0  # host seconds to launch a collective
    kernel_s: float = 3e-6  # device seconds that a kernel takes at least
    microbatch_s: float = 0.0  # host seconds of a micro-batch that no operator accounts for
    step_s: float = 0.0  # host seconds of a step that no operator accounts for
    hook_s: float = 200e-6  # host seconds around a gathering or a reduction of a sharded unit
    # Whether a second forward of recompute=full ends with the last tensor that backward needs.
    stops_recomputing: bool = False
    # Whether CPU ranks that share parameters compare which unit comes next.
    roll_call: bool = False
    slowdown: float = 0.1  # the part by which a collective slows computing beside it
    # Whether ranks of a tensor axis cut activations between layers along the sequence.
    sequence_parallel: bool = False
    # A sample's bytes from which they cut activations between layers even so, but keep gathered
    # inputs of products whole.
    cut_sequence_bytes: float = float("inf")
    hidden_exchange: float = 0.0  # the part of the tensor axis' exchanges that computing hides
    link_rate: float = 1.0  # the part of the bandwidth in a node that its collectives reach
    network_rate: float = 1.0  # the part of the bandwidth across nodes that its collectives reach
    # The highest rates at which its collectives send from a device within a node, and from a node,
    # if copies through the host's memory or sockets make them lower than the links' rates.
    device_bytes_per_s: float = float("inf")
    node_bytes_per_s: float = float("inf")
    # The rate at which a worker's or a server's process sends or receives through its host's
    # memory, and the time that each message waits there.
    process_bytes_per_s: float = float("inf")
    process_latency_s: float = 0.0
    overlaps: bool = True  # whether gradients travel while backward goes on
    # Whether sharded parameters are gathered while the unit before is computed.
    prefetches: bool = True
    # Whether each rank of a tensor axis sends only its part to the next stage.
    cuts_messages: bool = True
    waits_for_sends: bool = False  # whether a stage waits until what it sends has arrived
    # How often the optimizer moves its bytes, with scaling and clipping.
    update_passes: float = 1.0
    # Bytes of a device before the first tensor: buffers of the driver, the kernels and the
    # collectives.
    context_bytes: float = 1.0e9
    reserved: float = 1.0  # bytes that the allocator takes from the device for a byte of tensors
    # The spread of measured steps around predicted ones: 80 % lie within this part of the
    # logarithm.
    spread: float = 0.2
    # How its models compute attention. "fused" never writes the scores; "plain" writes them and
    # their softmax.
    attention: Literal["fused", "plain"] = "fused"
    activation_bytes: int = 4  # of a value between layers of the models that it trains

    def on(self, network: Network) -> Network:
        """Return a network with the rates that this program's collectives reach."""
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
        """The rates of convolutions by the kind of the product."""
        return {
            "convolution": self.convolution_rate,
            "small convolution": self.small_convolution_rate,
        }


# docs/formulas.md, "Programs", has the source of each figure and says which are assumed. The
# figures of servers: sockets with a thread for each worker carry 4.1 to 4.7 GB/s between processes
# of one host, and a small message between two takes 0.1 ms.
PACELINE = Software(
    stops_recomputing=True,
    roll_call=True,
    microbatch_s=0.6e-3,
    process_bytes_per_s=4.4e9,
    process_latency_s=1e-4,
    cut_sequence_bytes=SEQUENCE_BYTES,
)
