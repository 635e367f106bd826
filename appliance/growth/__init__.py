"""Growth: the schedules of a plan, played on as many wafers, with as fast links, as one likes."""
