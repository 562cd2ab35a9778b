"""The command line: starts the workers of a job on this machine and watches over them.

    command  ── reads the arguments; the only module that the `parallax` script calls
      local  ── starts the agent, relays output, ends everything, finds the first failure
        agent  ── a process of its own: torch's elastic agent, which starts the workers
          worker  ── in each worker, before and after the user's script

Nothing here imports torch except the agent process, so that the command answers at once.
"""
