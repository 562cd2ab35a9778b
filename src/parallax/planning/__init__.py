"""Which route each parameter takes, and what that costs.

    analysis       what each parameter is                cost       bytes that a route moves
    forecast       seconds that a step should take       memory     free memory of this machine
    plan           the route of each parameter           planner    how routes are chosen

While training runs:

    drift          workers and links whose speed has changed
    tuner          the number of parts in which gradients of rows are pushed
    replan         decides from what steps have touched
    adaptive_plan  the plan in force, and where its changes are recorded

The command line reads plans too, so `cost`, `forecast` and `plan` do not import torch.
"""
