"""horovodrun without its look at what Horovod was built with, for which it imports TensorFlow each
time, before it starts a rank. The tests have imported Horovod by then, and jobs show whether it
works. What horovodrun itself finds there is seen by test_launchers.py, scripts/demo.py and jobs
under MPI.
"""

import sys

from horovod.runner import launch

if __name__ == "__main__":
    launch.gloo_built = lambda verbose=False: True
    sys.exit(launch.run_commandline())
