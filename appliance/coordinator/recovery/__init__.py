"""What a job does when somebody dies: recovery points, replacements, and a new epoch that goes on from a point."""
