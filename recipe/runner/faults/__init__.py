"""What ends a run early: dead processes, machines that are taken back, missing resources, bad gradients."""
