# ruff: noqa: E501
"""Names of real kernels of trainers and servers, and the class that each must get from its name alone."""

from __future__ import annotations

import pytest

from moesim.simulator.trace.classes import CLASSES, classify, context

NAMES: dict[str, str] = {
    "gemm": """
        nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN
        nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT
        sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas
        ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn
        void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>(cutlass_80_wmma::Params)
        void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(cutlass_80_tensorop::Params)
        void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, true, false>(float)
        void cublasLt::epilogue::impl::globalKernel<8, 32, float, __nv_bfloat16, __nv_bfloat16, float, true>(int)
        void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>(int)
        void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, 128u, 128u, 1u, 5u, 1u, true, (deep_gemm::GemmType)0>(float*)
        void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 24576u, 1536u, 1u, 64u, 128u, 128u, 128u, (deep_gemm::GemmType)0>(float*)
        void cutlass::device_kernel<vllm::enable_sm90_or_later<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>>
        Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1
        Custom_Cijk_Alik_Bljk_F8BS_BH_Bias_SHB_HA_S_SAB_SAV_UserArgs_shortname0_gfx942
        _ZN2ck27kernel_gemm_xdl_cshuffle_v3INS_28GridwiseGemm_xdl_cshuffle_v3E
        _ZN5aiter24bf16gemm_fp32bf16_tn_96x64_pf3_splitkE
        void wvSplitK_hf_sml_<__hip_bfloat16, 64, 4, 16, 8, 2, 2>(int, int, __hip_bfloat16 const*)
        void marlin::Marlin<__nv_bfloat16, 1125899906909960l, 256, 4, 16, 4, true, 4, 8, false>(int4 const*, int4 const*)
        _w8a8_block_fp8_matmul
        triton_tem_fused__scaled_mm_mm_14
        triton_tem_fused_mm_t_3""",
    "grouped_gemm": """
        _ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel13GemmUniversalINS5_17GroupProblemShapeIN4cute5tupleIJiiiEEEEE
        void cutlass::Kernel2<cutlass::gemm::kernel::GemmGrouped<cutlass::gemm::threadblock::MmaMultistage<cutlass::gemm::GemmShape<128, 128, 32>>>>
        void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, 128u, 128u, 32u, 5u, 1u, true, (deep_gemm::GemmType)1>(float*)
        void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u, 32u, 128u, (deep_gemm::GemmType)2>(float*)
        fused_moe_kernel
        fused_moe_kernel_gptq_awq
        _matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu
        bmm_Bfloat16_E4m3E4m3_Fp32_t128x16x256_s4_et128x16_m128x16x32_cga1x1x1_16dp256b_TN_transOut_dynBatch_sm100a
        bmm_E4m3_E4m3E4m3_Fp32_t128x8x128u2_s8_et64x8_m64x8x32_cga1x1x1_16dp256b_TN_transOut_schedS_biasM_swiGlu_dynBatch
        void marlin_moe_wna16::Marlin<__nv_bfloat16, 1125899906909960l, 256, 4, 16, 4, true, 4, 8, false>(int4 const*)
        _ZN2ck15kernel_moe_gemmINS_16GridwiseMoeGemmE
        aiter::fmoe_bf16_pertokenFp8_g1u1_vs_silu_1tg_32x256
        _kernel_mg_forward_hopper""",
    "attention_forward": """
        void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>(Flash_fwd_params)
        void pytorch_flash::flash_fwd_splitkv_combine_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>
        void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cute::tuple>>>>
        cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0
        fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)
        fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext
        _attn_fwd
        triton_tem_fused_flex_attention_0
        void flashinfer::BatchPrefillWithPagedKVCacheKernel<(flashinfer::MaskMode)1, 128u, 8u>(flashinfer::Params)
        void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u>(flashinfer::Params)
        void vllm::paged_attention_v2_kernel<__nv_bfloat16, __nv_bfloat16, 128, 16, 128>(float*, float*)
        void vllm::merge_attn_states_kernel<__nv_bfloat16, 128u, true>(__nv_bfloat16*)
        kernel_unified_attention_2d
        _fwd_grouped_kernel_stage1
        void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64, 64, 8>>(Flash_fwd_mla_params)
        _ZN7ck_tile6kentryILi1ENS_13FmhaFwdKernelINS_17FmhaFwdPipelineE
        aiter::fmha_fwd_hd128_bf16_causal_rtz_group
        _ZN5aiter41mla_dec_stage1_bf16_a16w16_subQ16_mqa16E
        void paged_attention_ll4mi_QKV_mfma16_kernel<__hip_bfloat16, __hip_bfloat16>
        void transformer_engine::fused_softmax::scaled_upper_triang_masked_softmax_warp_forward<__nv_bfloat16, float, 12>(__nv_bfloat16*)
        void transformer_engine::scaled_aligned_causal_masked_softmax_warp_forward<__nv_bfloat16, float, 11>
""",
    "attention_backward": """
        void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>(Flash_bwd_params)
        void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90<2>>>>
        cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_128x64x128_1x1x1_cga1x1x1_kernel0_0
        fmha_cutlassB_bf16_aligned_128x64_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<cutlass::bfloat16_t>::Params)
        _attn_bwd_dkdv
        _ZN7ck_tile6kentryILi1ENS_22FmhaBwdDQDKDVKernelINS_24BlockFmhaBwdE
        aiter::fmha_bwd_hd128_bf16_causal_a32_rtz_psskddv
        void transformer_engine::scaled_upper_triang_masked_softmax_warp_backward<__nv_bfloat16, __nv_bfloat16, float, 12>
""",
    "attention_pre_post": """
        void flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128, 64, 128, 8>>(Flash_bwd_params)
        void flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>(Flash_bwd_params, int)
        void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<cute::tuple<cute::C<64>>>>
        void cutlass::device_kernel<flash::FlashAttnBwdPostprocessConvertdQ<cute::tuple<cute::C<64>>>>
        void cudnn::fusion::compute_dot_do_o_specialized<true, 128, 128>(__nv_bfloat16*)
        cudnn::fusion::convert_dq_to_16bits
        _attn_bwd_preprocess
        _ZN7ck_tile6kentryILi1ENS_22FmhaBwdOGradDotOKernelE
        _ZN7ck_tile6kentryILi1ENS_24FmhaBwdConvertQGradKernelE""",
    "norm": """
        void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<transformer_engine::Kernel_traits<__nv_bfloat16>>(Params)
        void transformer_engine::normalization::rmsnorm_bwd_finalize_tuned_kernel<Kernel_traits<__nv_bfloat16>>(Params)
        void layer_norm::ln_fwd_kernel<layer_norm::Kernel_traits<__nv_bfloat16, float, 7168u, 1u, 4u>>(layer_norm::FwdParams)
        void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*, c10::BFloat16 const*)
        std::enable_if<true, void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)
        void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)
        void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>(long, long)
        void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float, float>(long, float)
        void cuComputeGradInput<__nv_bfloat16, float, __nv_bfloat16>(__nv_bfloat16 const*)
        _ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOnePassE
        l2norm_fwd_kernel
        _layer_norm_bwd_kernel
        triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_5
        triton_per_fused__fused_rms_norm__fused_rms_norm_backward_7""",
    "swiglu": """
        void vllm::act_and_mul_kernel<c10::BFloat16, &(c10::BFloat16 vllm::silu_kernel<c10::BFloat16>), true>(c10::BFloat16*)
        void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &(silu(float const&))>(__nv_bfloat16*)
        void transformer_engine::gated_act_kernel<8, float, transformer_engine::Empty, &transformer_engine::silu, __nv_bfloat16>
        void transformer_engine::gated_kernels::cast_fp8_gated_kernel<true, transformer_engine::Empty, &silu, &dsilu>(CUtensorMap)
        _silu_mul_fp8_quant_deep_gemm
        _silu_and_mul_post_quant_kernel
        _swiglu_backward_kernel
        void tensorrt_llm::kernels::cutlass_kernels::doActivationKernel<__nv_bfloat16, __nv_bfloat16>(__nv_bfloat16*)
        void moe::dev::activation::activationDeepSeekKernel<moe::dev::activation::KernelParams<cutlass::float_e4m3_t, true>>
        triton_poi_fused_mul_silu_3""",
    "rope": """
        void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>(__nv_bfloat16 const*, int const*, float const*)
        void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*)
        void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<true, 128u, 8u>(__nv_bfloat16*)
        rotary_kernel
        triton_poi_fused_add_cat_mul_neg_slice_2
        triton_poi_fused__to_copy_mul_view_as_complex_view_as_real_9""",
    "topk": """
        void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, 32, int>(float const*, bool const*, float*, int, int*)
        void vllm::moe::grouped_topk_fused_kernel<float, float, int, 256>(float*)
        void moe_fused_gate_kernel<cutlass::bfloat16_t, 32, 256, 8, 8, 4, 6>(void*)
        void transformer_engine::fused_topk_with_score_function_forward_kernel<float>(float const*, int, int, int)
        void transformer_engine::fused_score_for_moe_aux_loss_forward_kernel<float>(float const*)
        void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(at::cuda::detail::TensorInfo<float const>)
        void at::native::bitonicSortKVInPlace<-2, -1, 16, 16, float, long>(at::cuda::detail::TensorInfo<float>)
        void moe::dev::routing::routingDeepSeek::routingMainKernel<moe::dev::routing::KernelParams<float>>""",
    "permute": """
        void moe_permute_topK_kernel<__nv_bfloat16, __nv_bfloat16, 128, true>(__nv_bfloat16 const*)
        void moe_recover_topK_kernel<__nv_bfloat16, __nv_bfloat16, true>(__nv_bfloat16 const*)
        void moe_unpermute_kernel<__nv_bfloat16, float, 8, true>(__nv_bfloat16 const*)
        _permute_kernel
        _unpermute_bwd_with_merging_probs_kernel
        _row_id_map_pass_1_kernel
        _sort_chunks_by_map_kernel
        _indices_to_multihot_kernel
        void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*, int*)
        void vllm::moe::count_and_sort_expert_tokens_kernel<int>(int const*, int*)
        void vllm::moe::moe_sum_kernel<c10::BFloat16, 8>(c10::BFloat16*)
        void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<__nv_bfloat16>(__nv_bfloat16 const*)
        void tensorrt_llm::kernels::cutlass_kernels::finalizeMoeRoutingKernel<__nv_bfloat16, __nv_bfloat16>(__nv_bfloat16 const*)
        void moe::dev::finalize::finalizeKernelVecLoad<moe::dev::finalize::KernelParams<cutlass::bfloat16_t>>
        _finalize_matmul_scatter_bf16
        _ZN7ck_tile6kentryILi1ENS_16MoeSortingKernelINS_17MoeSortingProblemE
        pre_reorder_triton_kernel
        _fwd_kernel_ep_scatter_2
        _fill_indices_kernel
        void hybrid_ep::permute_kernel<__nv_bfloat16, float, 512>(__nv_bfloat16*)
        void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)
        void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>""",
    "cast": """
        void transformer_engine::(anonymous namespace)::cast_transpose_general_kernel<8, 8, float, __nv_bfloat16, __nv_fp8_e4m3>
        void transformer_engine::(anonymous namespace)::block_scaled_1d_cast_transpose_kernel<true, float, __nv_bfloat16>
        void transformer_engine::mxfp8_kernel::cast_mxfp8_2D_kernel<false, false, false>(CUtensorMap)
        void transformer_engine::swizzle_col_scaling_kernel<int4, 128, 4>(void const*, void*)
        void transformer_engine::delayed_scaling_recipe::kernel_bulk(AmaxParams, unsigned long)
        void transformer_engine::(anonymous namespace)::amax_kernel<8, true, __nv_bfloat16>(__nv_bfloat16 const*)
        void vllm::dynamic_per_token_scaled_fp8_quant_kernel<c10::BFloat16, c10::Float8_e4m3fn>(c10::Float8_e4m3fn*)
        void tensorrt_llm::kernels::quantize_with_block_size<(tensorrt_llm::BlockScaleQuantizationType)2, __nv_bfloat16, 32, true>(int, flashinfer::QuantizationSFLayout)
        _per_token_group_quant_fp8
        void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}>
        triton_poi_fused__to_copy_1
        triton_red_fused__to_copy_abs_amax_clamp_div_2""",
    "transpose": """
        void transformer_engine::(anonymous namespace)::transpose_general_kernel<8, 8, __nv_fp8_e4m3>(__nv_fp8_e4m3 const*)
        void deep_gemm::transpose_fp32<512u, 64u, 1u>(float const*, float*, unsigned int)
        deep_gemm::transpose_and_pack_fp32_into_ue8m0<64u, 1u, 32u>""",
    "optimizer": """
        void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float, int>, float, float, float>(long)
        void transformer_engine::multi_tensor_apply_kernel<4, true, transformer_engine::multi_tensor_adam::AdamFunctorMaster<float>>
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4, 1>>""",
    "clip": """
        void multi_tensor_apply_kernel<TensorListMetadata<1>, L2NormFunctor<float>, float*, float*, bool, int>(long)
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, at::native::LpNormFunctor<float, 2>>
        void at::native::lpnorm_cleanup<float, (at::native::NormType)1, float, float>(float const*)
        cleanup(float*, float*, float*, float*, bool, int)""",
    "loss": """
        void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>
        void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*)
        liger_cross_entropy_kernel
        online_softmax_kernel
        triton_red_fused__log_softmax_nll_loss_forward_3""",
    "fsdp_copy": """
        void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float, c10::BFloat16>(c10::BFloat16**)
        void at::native::(anonymous namespace)::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**)""",
    "elementwise": """
        void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>(int)
        void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add<long>>(int)
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>>>
        void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::neg_kernel_cuda(at::TensorIteratorBase&)>>
        triton_poi_fused_add_12
        triton_poi_fused_mul_sigmoid_4""",
    "not_in_model": """
        sm80_xmma_fprop_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_stage3
        cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized_bf16_256x128_32x3_nhwc_unity_stride_align8>
        void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1>(cudnnTensorStruct, float const*)
        igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8_ws1x1_wr2x2
        batched_transpose_16x32_half
        _ZN2ck16tensor_operation6device12_GLOBAL__N_149kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffleE
        void split_embedding_codegen_forward_unweighted_kernel<float, float, float, long, false>(float)
        void fbgemm_gpu::permute_2D_lengths_kernel<int>(int, int, int const*)
        void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(__nv_bfloat16*)
        void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(__nv_bfloat16*)
        set_mla_kv_buffer_kernel
        void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u, float, int>(float*)
        void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4>""",
    "all_reduce": """
        ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)
        ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16(ncclSymkDevWorkArgs)
        void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)
        void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8, __nv_bfloat16>(int)
        void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16*)
        void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<__half>>""",
    "all_gather": """
        ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        userbuffers_fp16_sum_inplace_gpu_mc_ag<8>(int, int, int)""",
    "reduce_scatter": """
        ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int, int)""",
    "send_recv": """
        ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)
        ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)
        kuserbuffers_pushrecv(int, int, int, int*, int)
        kuserbuffers_pushsend(int*, int*, int4*, int4*, int)""",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "other_communication": """
        ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)
        mscclKernel_Sum_bf16_SIMPLE_false(ncclDevComm*)""",
    "ep_dispatch": """
        void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*, long*, float*, int*)
        void deep_ep::internode::dispatch<false, 4, false, 10, 1>(int4*, float*)
        void deep_ep::internode_ll::dispatch<true, false, 7168>(void*, void*, int*)
        void hybrid_ep::dispatch_kernel<hybrid_ep::INTER_NODE_GROUP, 4, 8>(hybrid_ep::dispatch_kernel_param_t)
        void uccl::internode::dispatch<false, 2, false>(int4*)
        void mori::moe::EpDispatchIntraNodeKernel<__hip_bfloat16>(mori::moe::EpDispatchCombineArgs<__hip_bfloat16>)""",
    "ep_combine": """
        void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(__nv_bfloat16*, float*)
        void deep_ep::internode_ll::combine<true, 7168, 9>(void*, void*, int*)
        void hybrid_ep::combine_kernel<hybrid_ep::INTRA_NODE_RED_GROUP, 4>(hybrid_ep::combine_kernel_param_t)
        void mori::moe::EpCombineIntraNodeKernel<__hip_bfloat16>(mori::moe::EpDispatchCombineArgs<__hip_bfloat16>)""",
    "ep_notify": """
        void deep_ep::intranode::notify_dispatch<8>(int const*, int*, int const*)
        void deep_ep::intranode::cached_notify_combine<8>(void**, int*, int, int, int)
        void deep_ep::internode::notify_dispatch<false, 2>(int const*)
        void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)
        void deep_ep::intranode::barrier<8>(int**, int)
        void deep_ep::internode_ll::clean_low_latency_buffer<1024>(long*, int)
        void hybrid_ep::scan<512, 8, 4>(bool const*, hybrid_ep::tmp_state_t*)""",
    "memcpy_d2d": "__amd_rocclr_copyBuffer",
    "memset": "__amd_rocclr_fillBufferAligned",
    "copy": """
        void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 4, 64, 64>
        void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>>
        triton_poi_fused_constant_pad_nd_moe_forward_0""",
    "fill": "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>>(int)",
    "unclassified": """
        my_kernel
        kernel_cuda_0
        _fwd_kernel""",
    "scan": """
        chunk_fwd_kernel_o
        chunk_gated_delta_rule_fwd_kernel_h_blockdim64
        chunk_scaled_dot_kkt_fwd_kernel
        recompute_w_u_fwd_kernel
        merge_16x16_to_64x64_inverse_kernel
        chunk_local_cumsum_scalar_kernel
        fused_recurrent_gated_delta_rule_fwd_kernel
        void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16, 1, true, true, true>>(SSMParamsBase)
        _chunk_scan_fwd_kernel
        _state_passing_fwd_kernel
        void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4, true, c10::BFloat16>>(ConvParamsBase)
        chunk_bwd_kernel_dqkwg
        prepare_wy_repr_bwd_kernel
        void selective_scan_bwd_kernel<Selective_Scan_bwd_kernel_traits<128, 16, true, true>>(SSMParamsBwd)
        void causal_conv1d_bwd_kernel<Causal_conv1d_bwd_kernel_traits<128, 4, true>>(ConvParamsBwd)""",
}


@pytest.mark.parametrize("cls", NAMES)
def test_kernels_get_their_class_by_name(cls: str) -> None:
    assert cls in CLASSES
    names = [line.strip() for line in NAMES[cls].strip().splitlines()]
    found = {name: context([classify(name, (), 0)], [""])[0] for name in names}
    assert found == dict.fromkeys(names, cls)
