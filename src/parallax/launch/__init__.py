"""The command line: starts the workers of a job, on this machine or many, and watches over them.

    command  ── reads the arguments; the only module that the `parallax` script calls
      launcher, attempt  ── reaches the hosts, shows output, finds the first failure, restarts
        connection, ssh  ── one for each host: the way to its process, over ssh or as a child
          host/process  ── on each host: starts its agent, relays output, ends everything
            host/agent  ── a process of its own: torch's elastic agent, which starts the workers
              host/worker  ── in each worker, before and after the user's script
      check/  ── looks at the hosts and measures the links between them

Nothing here imports torch except the agent process, so that the command answers at once.
"""
