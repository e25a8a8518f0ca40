"""The packing kernel: on which node, and on which of its devices, does a demand cost the pool least?

It holds residuals, an index of nodes that are alike, and policies that score them; all in integers, all pure. Events,
queues, quotas, gangs and preemption are left to the placer that calls it.
"""
