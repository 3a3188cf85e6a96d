"""What was sampled, from the first token to the batch for the workers.

A row of a request becomes a :class:`Sample`. It has one :class:`Trajectory`, or one for each player of an episode. A
trajectory is a list of :class:`Segment` objects in the order of time: one, or several where a template or an agent
rewrites the history of a conversation. All of them are ragged. ``collate`` is the only place that pads tokens, and
``join_samples`` makes the batch of the controller from the samples of a step.
"""

from verl.trajectories.collate import collate, position_ids_from_mask, uncollate
from verl.trajectories.types import Sample, Segment, Trajectory, turn_ends

__all__ = ["Sample", "Segment", "Trajectory", "collate", "position_ids_from_mask", "turn_ends", "uncollate"]
