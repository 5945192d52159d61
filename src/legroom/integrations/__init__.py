"""Thin adapters to training frameworks; they decide nothing themselves.

guard                 what every adapter does: watch memory, tune at each epoch, log, ask for a checkpoint in time
checkpoint            save and restore a training run
lightning             a callback for Lightning's Trainer
huggingface           a callback for Hugging Face's Trainer
accelerate            a guard for a loop under accelerate
ray                   a guard for a loop in a Ray Train worker; load, list and diagnose on every node
ray_cluster_commands  load, list, remove and diagnose on every node of a Ray cluster; each byte is read by one node
ray_divide_download   which node reads which part of an object, and who gets it from whom
ray_node              what a node answers about its machine and cache; its part in a load
deepspeed             a DeepSpeed configuration from Legroom's settings, and what each ZeRO stage saves
"""
