"""The packing kernel: the node, and the devices of it, on which a demand costs the pool least.

It holds residuals, an index of nodes that are alike, and policies that score them; all in integers, all pure. Events,
queues, quotas, gangs and preemption are left to the placer that calls it.
"""
