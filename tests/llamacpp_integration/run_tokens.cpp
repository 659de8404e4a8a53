// SPDX-License-Identifier: Apache-2.0
// What llama.cpp computes for token numbers, or makes of a text.
//
//   run-tokens MODEL logits OUT NEW TOKEN...   float32 logits [tokens, vocabulary] into the file OUT; prints the NEW
//                                              tokens that greedy decoding adds
//   run-tokens MODEL tokenize TEXT             prints the tokens of a text, special ones recognised
//
// Keys and values are cached in float32 and attention is not fused, so that all rounding is that of the weights' types.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "llama.h"

static void quiet(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        std::fputs(text, stderr);
    }
}

[[noreturn]] static void fail(const char * what) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

static int tokenize(const llama_vocab * vocab, const char * text) {
    std::vector<llama_token> tokens(std::strlen(text) + 8);
    const int count = llama_tokenize(vocab, text, std::strlen(text), tokens.data(), tokens.size(), true, true);
    for (int i = 0; i < count; ++i) {
        std::printf("%d ", tokens[i]);
    }
    return count < 0;
}

static void decode(llama_context * context, const std::vector<llama_token> & tokens, int position) {
    llama_batch batch = llama_batch_init(tokens.size(), 0, 1);
    batch.n_tokens = tokens.size();
    for (int i = 0; i < batch.n_tokens; ++i) {
        batch.token[i] = tokens[i];
        batch.pos[i] = position + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = true;
    }
    if (llama_decode(context, batch) != 0) {
        fail("llama_decode failed");
    }
    llama_batch_free(batch);
}

int main(int count, char ** arguments) {
    if (count < 4) {
        fail("usage: run-tokens MODEL logits OUT NEW TOKEN... | run-tokens MODEL tokenize TEXT");
    }
    llama_log_set(quiet, nullptr);
    llama_backend_init();
    llama_model_params model_options = llama_model_default_params();
    model_options.n_gpu_layers = 0;
    const bool tokens_only = std::string(arguments[2]) == "tokenize";
    model_options.vocab_only = tokens_only;
    llama_model * model = llama_model_load_from_file(arguments[1], model_options);
    if (model == nullptr) {
        fail("the file cannot be loaded");
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);
    if (tokens_only) {
        return tokenize(vocab, arguments[3]);
    }

    std::vector<llama_token> tokens;
    for (int i = 5; i < count; ++i) {
        tokens.push_back(std::atoi(arguments[i]));
    }
    const int n_new = std::atoi(arguments[4]);
    llama_context_params options = llama_context_default_params();
    options.n_ctx = tokens.size() + n_new + 8;
    options.n_batch = options.n_ubatch = options.n_ctx;
    options.n_threads = options.n_threads_batch = 1;
    options.type_k = options.type_v = GGML_TYPE_F32;
    options.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * context = llama_init_from_model(model, options);
    if (context == nullptr) {
        fail("no context");
    }

    const size_t n_vocab = llama_vocab_n_tokens(vocab);
    decode(context, tokens, 0);
    FILE * out = std::fopen(arguments[3], "wb");
    for (size_t i = 0; i < tokens.size(); ++i) {
        std::fwrite(llama_get_logits_ith(context, i), sizeof(float), n_vocab, out);
    }
    std::fclose(out);
    const float * last = llama_get_logits_ith(context, -1);
    for (int i = 0; i < n_new; ++i) {
        const llama_token next = std::max_element(last, last + n_vocab) - last;
        std::printf("%d ", next);
        decode(context, {next}, tokens.size() + i);
        last = llama_get_logits_ith(context, -1);
    }
    llama_free(context);
    llama_model_free(model);
}
