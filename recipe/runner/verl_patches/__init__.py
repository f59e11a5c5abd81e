"""Every departure from verl 0.9.1, and from the vLLM that it runs, of a run on any machine: one module each.

Each says what it changes, why neither a setting nor a public hook serves, and the version it was written against;
``tests/unit/test_upstream.py`` fails for the one that is no longer needed. Nothing here is changed by an import: a
run's trainer, its worker class or the plugin calls it, in processes of a run of the runner's only. What CPUs need
besides is :mod:`recipe.runner.cpu.patches`.

| module | changes | for |
|---|---|---|
| ``server_slots`` | ``RolloutReplica.max_concurrency`` | asynchronous modes with many requests |
| ``packs`` | ``TrainingWorker.infer_batch``, the rows of each rank | old and new log-probabilities rounded alike |
| ``sockets`` | ``BucketedWeightSender`` and ``-Receiver`` | weights on one machine, out of others' reach |
| ``frames`` | ``ZMQMessage.serialize``, ``deserialize`` of TransferQueue | only the run's own messages are read |
| ``stores`` | ``TCPStore`` in ``torch.distributed.rendezvous`` | a store listens at its address alone |
| ``weight_copies`` | ``DetachActorWorker.copy_handler``, ``restore_handler`` | copies of weights that lie on the host |
| ``shown`` | ``pprint`` of ``main_ppo``, ``Tracking`` of ``trainer_base`` | secrets of the configuration |
"""
