"""The keys that each tool knows, and those that it no longer knows.

Lists and not look-ups in the installed packages: doctor must answer in a blink, and for machines on which nothing is installed. A test
compares them with the packages that are installed where the tests run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from brim.audit.pins import Pins


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, kw_only=True)
class Removed:
    """A key that a release of its tool removed."""

    until: str = ""
    """The first release without it; empty: no release reads it."""
    instead: str = ""
    """The key that replaces it; empty: none."""
    since: str = ""
    """The first release with that key."""
    same_values: bool = False
    """Whether the new key takes the same values."""
    changes_training: bool = True
    """Whether the run trains differently without it."""
    needs_transformers: str = ""
    """Of a package that builds on transformers: the oldest release that `until` can be installed with."""
    idle: tuple[object, ...] = (None,)
    """Values that change nothing: the default, and what means the same."""

    def is_gone(self, package: str, pins: Pins) -> bool:
        """Whether the project may run with a release that does not have the key."""
        if self.needs_transformers and not pins.allows("transformers", f">={self.needs_transformers}"):
            return False
        return not self.until or pins.allows(package, f">={self.until}")


ARGUMENTS: Final = _words(
    """
    accelerator_config adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16
    bf16_full_eval data_seed dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
    dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
    ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed disable_tqdm do_eval do_predict do_train enable_jit_checkpoint
    eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object fp16
    fp16_full_eval fsdp fsdp_config full_determinism generation_config generation_max_length generation_num_beams
    gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id
    hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip include_for_metrics include_num_input_tokens_seen label_names
    label_smoothing_factor learning_rate length_column_name liger_kernel_config load_best_model_at_end local_rank log_level
    log_level_replica log_on_each_node logging_first_step logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs
    lr_scheduler_type max_grad_norm max_steps metric_for_best_model neftune_noise_alpha num_train_epochs optim optim_args
    optim_target_modules output_dir parallelism_config per_device_eval_batch_size per_device_train_batch_size predict_with_generate
    prediction_loss_only project push_to_hub remove_unused_columns report_to restore_callback_states_from_checkpoint
    resume_from_checkpoint run_name save_on_each_node save_only_model save_steps save_strategy save_total_limit seed skip_memory_metrics
    sortish_sampler tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id
    trackio_space_id trackio_static_space_id train_sampling_strategy use_cache use_cpu use_liger_kernel warmup_steps weight_decay
    """
)
"""TrainingArguments and Seq2SeqTrainingArguments of transformers 5.22."""

_OFF: Final = (None, False)

REMOVED_ARGUMENTS: Final[dict[str, Removed]] = {
    "per_gpu_train_batch_size": Removed(until="5.0", instead="per_device_train_batch_size", since="2.11", same_values=True),
    "per_gpu_eval_batch_size": Removed(until="5.0", instead="per_device_eval_batch_size", since="2.11", same_values=True),
    "evaluation_strategy": Removed(
        until="4.51", instead="eval_strategy", since="4.41", same_values=True, idle=(None, False, "no")
    ),
    "evaluate_during_training": Removed(until="4.0", instead="eval_strategy", since="4.41", idle=_OFF),
    "no_cuda": Removed(until="5.0", instead="use_cpu", since="4.32", same_values=True, idle=_OFF),
    "warmup_ratio": Removed(until="5.15", instead="warmup_steps", since="5.0", idle=(None, 0, 0.0)),
    "group_by_length": Removed(until="5.2", instead="train_sampling_strategy", since="5.2", idle=_OFF),
    "adafactor": Removed(until="5.0", instead="optim", since="4.16", idle=_OFF),
    "fp16_backend": Removed(until="5.0", idle=(None, "auto", "amp")),
    "half_precision_backend": Removed(until="5.0", idle=(None, "auto", "amp", "cuda_amp")),
    "fp16_opt_level": Removed(until="5.0", changes_training=False),
    "dispatch_batches": Removed(until="4.51", instead="accelerator_config", since="4.38"),
    "split_batches": Removed(until="4.51", instead="accelerator_config", since="4.38", idle=_OFF),
    "fsdp_min_num_params": Removed(until="5.0", instead="fsdp_config", since="4.27", idle=(None, 0)),
    "fsdp_transformer_layer_cls_to_wrap": Removed(until="5.0", instead="fsdp_config", since="4.27"),
    "sharded_ddp": Removed(until="4.35", idle=(None, False, "")),
    "torchdynamo": Removed(until="5.0", instead="torch_compile_backend", since="4.26"),
    "xpu_backend": Removed(until="4.32", instead="ddp_backend", since="4.29", same_values=True),
    "use_mps_device": Removed(until="5.0", changes_training=False),
    "use_ipex": Removed(until="4.57", changes_training=False),
    "jit_mode_eval": Removed(until="5.0", changes_training=False),
    "tpu_num_cores": Removed(until="5.0", changes_training=False),
    "tpu_metrics_debug": Removed(until="5.0", instead="debug", since="3.0.1", changes_training=False),
    "past_index": Removed(until="5.0", changes_training=False),
    "mp_parameters": Removed(until="5.0", changes_training=False),
    "ray_scope": Removed(until="5.0", changes_training=False),
    "overwrite_output_dir": Removed(until="5.0", changes_training=False),
    "logging_dir": Removed(until="5.15", changes_training=False),
    "save_safetensors": Removed(until="5.0", changes_training=False),
    "include_inputs_for_metrics": Removed(until="5.0", instead="include_for_metrics", since="4.46", changes_training=False),
    "include_tokens_per_second": Removed(
        until="5.0", instead="include_num_input_tokens_seen", since="4.36", same_values=True, changes_training=False
    ),
    "push_to_hub_model_id": Removed(until="5.0", instead="hub_model_id", since="4.11", same_values=True, changes_training=False),
    "push_to_hub_organization": Removed(until="5.0", instead="hub_model_id", since="4.11", changes_training=False),
    "push_to_hub_token": Removed(until="5.0", instead="hub_token", since="4.11", same_values=True, changes_training=False),
}
"""What TrainingArguments no longer has. Read in the fields of TrainingArguments at each release tag of transformers:
https://github.com/huggingface/transformers/blob/v5.15.0/src/transformers/training_args.py (and so on, down to v2.9.0)."""
REMOVED_EVERYWHERE: Final = (
    "per_gpu_train_batch_size",
    "per_gpu_eval_batch_size",
    "evaluation_strategy",
    "evaluate_during_training",
)
"""Of these, the ones that LLaMA-Factory, which brings its own version of transformers, does not take either."""

REMOVED_TRL: Final[dict[str, Removed]] = {
    "max_seq_length": Removed(until="0.20", instead="max_length", since="0.16", same_values=True, needs_transformers="4.53"),
    "torch_dtype": Removed(until="0.27", instead="dtype", since="0.23", same_values=True, needs_transformers="4.56"),
}
"""Read in SFTConfig and ModelConfig at each tag: https://github.com/huggingface/trl/blob/v0.20.0/trl/trainer/sft_config.py and
https://github.com/huggingface/trl/blob/v0.27.0/trl/trainer/model_config.py; what they need, in pyproject.toml of the same tags."""
REMOVED_AXOLOTL: Final[dict[str, Removed]] = {
    "max_packed_sequence_len": Removed(until="0.4", instead="sequence_len", since="0.1", idle=(None, 0)),
    "s2_attention": Removed(until="0.17", idle=_OFF),
    "dpo_norm_loss": Removed(until="0.16", idle=_OFF),
    "rpo_alpha": Removed(until="0.16"),
}
"""https://github.com/axolotl-ai-cloud/axolotl/blob/v0.17.0/src/axolotl/utils/schemas/deprecated.py, and the same names at each tag.
`evaluation_strategy` is not among them: axolotl takes it for `eval_strategy`."""
_DEEPSPEED_GONE: Final = "0.19.8"
REMOVED_DEEPSPEED: Final[dict[str, Removed]] = {
    "optimizer.params.max_grad_norm": Removed(instead="gradient_clipping", since="0.3", same_values=True, idle=(None, 0, 0.0)),
    "sparse_gradients": Removed(until=_DEEPSPEED_GONE, idle=_OFF),
    "amp": Removed(until=_DEEPSPEED_GONE, instead="fp16", since="0.3"),
    "elasticity": Removed(until=_DEEPSPEED_GONE, instead="train_batch_size", since="0.3"),
    "progressive_layer_drop": Removed(until=_DEEPSPEED_GONE),
    "curriculum_learning": Removed(until=_DEEPSPEED_GONE, instead="data_efficiency", since="0.8"),
    "compression_training": Removed(until=_DEEPSPEED_GONE),
    "quantize_training": Removed(until=_DEEPSPEED_GONE),
    "sparse_attention": Removed(until=_DEEPSPEED_GONE),
    "eigenvalue": Removed(until=_DEEPSPEED_GONE),
    "zero_optimization.mics_shard_size": Removed(until=_DEEPSPEED_GONE),
    "zero_optimization.zeropp_loco_param": Removed(until=_DEEPSPEED_GONE),
}
"""`_REMOVED_TOP_LEVEL_CONFIG_KEYS` of deepspeed/runtime/config.py in DeepSpeed 0.19.8, which 0.19.5 does not have yet; `max_grad_norm`
among the optimizer's parameters has never clipped anything there.
https://github.com/deepspeedai/DeepSpeed/blob/v0.19.5/deepspeed/runtime/config.py"""

TRL: Final = _words(
    """
    activation_offloading assistant_only_loss attn_implementation beta bnb_4bit_quant_storage bnb_4bit_quant_type chat_template_path
    completion_only_loss dataset_config dataset_kwargs dataset_name dataset_num_proc dataset_streaming dataset_test_split
    dataset_text_field dataset_train_split datasets dtype eos_token eval_packing ignore_bias_buffers load_in_4bit load_in_8bit lora_alpha
    lora_dropout lora_modules_to_save lora_r lora_target_modules lora_target_parameters lora_task_type loss_type max_completion_length
    max_length model_init_kwargs model_name_or_path model_revision num_generations num_processes packing packing_strategy
    pad_to_multiple_of padding_free precompute_ref_log_probs shuffle_dataset steps_per_generation generation_batch_size truncation_mode
    trust_remote_code use_bnb_nested_quant use_dora use_peft use_rslora use_vllm accelerate_config env
    """
)
LLAMA_FACTORY: Final = _words(
    """
    model_name_or_path adapter_name_or_path trust_remote_code flash_attn use_unsloth enable_liger_kernel disable_gradient_checkpointing
    use_reentrant_gc quantization_bit quantization_method quantization_type double_quantization stage finetuning_type lora_rank lora_alpha
    lora_dropout lora_target additional_target use_dora use_rslora pure_bf16 dataset dataset_dir eval_dataset template cutoff_len
    max_samples overwrite_cache preprocessing_num_workers packing neat_packing val_size train_on_prompt mask_history plot_loss
    upcast_layernorm upcast_lmhead_output mix_strategy streaming tokenized_path pref_beta pref_loss freeze_trainable_layers
    group_by_length warmup_ratio
    """
)
AXOLOTL: Final = _words(
    """
    base_model base_model_config model_type tokenizer_type tokenizer_config adapter lora_model_dir lora_r lora_alpha lora_dropout
    lora_target_modules lora_target_linear lora_modules_to_save lora_fan_in_fan_out load_in_8bit load_in_4bit datasets test_datasets
    val_set_size dataset_prepared_path sequence_len sample_packing eval_sample_packing pad_to_sequence_len output_dir micro_batch_size
    gradient_accumulation_steps batch_size eval_batch_size num_epochs max_steps optimizer optim_args lr_scheduler lr_scheduler_kwargs
    learning_rate weight_decay warmup_steps warmup_ratio max_grad_norm adam_beta1 adam_beta2 adam_beta3 adam_epsilon adam_epsilon2
    train_on_inputs group_by_length auto_find_batch_size bf16 fp16 tf32 bfloat16 float16 fp8 gradient_checkpointing
    gradient_checkpointing_kwargs early_stopping_patience logging_steps save_steps saves_per_epoch save_strategy save_total_limit eval_steps
    evals_per_epoch eval_strategy flash_attention sdp_attention flex_attention xformers_attention attn_implementation deepspeed
    fsdp fsdp_config fsdp_version fsdp_final_state_dict_type wandb_project wandb_entity wandb_run_id special_tokens chat_template
    dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last resume_from_checkpoint strict local_rank
    plugins seed rl unfrozen_parameters
    """
)
DEEPSPEED: Final = _words(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation steps_per_print dump_state
    disable_allgather communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor
    gradient_allreduce_op zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer activation_checkpointing
    comms_logger gradient_clipping fp16 bf16 torch_autocast optimizer scheduler flops_profiler wall_clock_breakdown memory_breakdown
    autotuning data_types checkpoint aio dataloader_drop_last data_efficiency tensorboard wandb csv_monitor comet hybrid_engine pipeline
    compile timers tensor_parallel sequence_parallel_size weight_quantization vocabulary_size use_data_before_expert_parallelism
    """
)
ACCELERATE: Final = _words(
    """
    compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines gpu_ids main_process_ip
    main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity fp8_config deepspeed_config fsdp_config
    parallelism_config megatron_lm_config mpirun_config downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands
    tpu_vm tpu_env dynamo_config dynamo_backend fp16 ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version
    transformers_version py_version sagemaker_inputs_file sagemaker_metrics_file additional_args
    """
)
"""Keys of the first level; accelerate 1.15 refuses a file with any other."""
