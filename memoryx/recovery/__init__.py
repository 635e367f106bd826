"""Recovery points: the states of a job after a step, in files that outlive the process."""
