"""Published data sets in verl's schema, and the embedded offline task with its small model."""
