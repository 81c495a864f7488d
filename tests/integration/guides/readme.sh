# The README of TensorRT-LLM's backend: its commands as they stand, but for the machine's paths, and for
# triton_backend, which is younger than they are: they run this template's default.
mkdir triton_model_repo
cp -r all_models/inflight_batcher_llm/* triton_model_repo/
rm -rf triton_model_repo/tensorrt_llm_bls
cp engines/fp16/1-gpu/* triton_model_repo/tensorrt_llm/1
export HF_GPT_MODEL=$MODEL
python3 tools/fill_template.py -i triton_model_repo/preprocessing/config.pbtxt "triton_max_batch_size:4,tokenizer_dir:${HF_GPT_MODEL},tokenizer_type:auto,preprocessing_instance_count:1"
python3 tools/fill_template.py -i triton_model_repo/postprocessing/config.pbtxt "triton_max_batch_size:4,tokenizer_dir:${HF_GPT_MODEL},tokenizer_type:auto,postprocessing_instance_count:1"
python3 tools/fill_template.py -i triton_model_repo/tensorrt_llm/config.pbtxt "triton_max_batch_size:4,decoupled_mode:True,engine_dir:$PWD/triton_model_repo/tensorrt_llm/1,batching_strategy:inflight_fused_batching,max_queue_delay_microseconds:100,batch_scheduler_policy:max_utilization"
python3 tools/fill_template.py -i triton_model_repo/ensemble/config.pbtxt "triton_max_batch_size:4"
exec python3 scripts/launch_triton_server.py --world_size=1 --model_repo=$PWD/triton_model_repo
