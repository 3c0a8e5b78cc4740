#!/usr/bin/env bash
# Builds the functions' images for the process runtime: folders IMAGES/stagecoach/NAME/0.1.0 with an
# executable `stage` and the model files that it loads. A second run builds only what has changed.
#
#   functions/images.sh build/images
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 IMAGES" >&2; exit 2; }
mkdir -p "$1"
images=$(cd "$1" && pwd)/stagecoach
cd "$(dirname "$0")/.."
version=0.1.0
models=build/models/ocr

# The same sources give the same program. A program that is up to date is not linked again.
programs=build/functions
packages=(ocr/detect ocr/recognise ocr/text noop echo-http wait spin onnx minilm/tokenize minilm/embed minilm/encode minilm/pool torch/weights)
mkdir -p "$programs"
${GO:-go} build -trimpath -buildvcs=false -o "$programs/" "${packages[@]/#/./functions/}"

# image NAME PROGRAM [FILE ...] makes the image NAME. PROGRAM is the last part of the program's
# package. Each FILE of the models' folder goes into the image's folder `model`. The program is
# called `stage` in the image. `as=X image ...` calls it X, for a function that does not speak the
# stage protocol.
image() {
  local to=$images/$1/$version program=$2 file
  shift 2
  mkdir -p "$to/model"
  put "$programs/$program" "$to/${as:-stage}"
  for file in "$@"; do
    [ -f "$models/$file" ] || { echo "images: $models/$file is missing: run make fetch" >&2; exit 1; }
    put "$models/$file" "$to/model/$file"
  done
}

# put links FROM to TO, or copies it to another file system, unless TO has the same content already.
# It replaces a file that is in use, and does not write to it.
put() {
  if ! cmp -s "$1" "$2"; then
    ln -f "$1" "$2" 2>/dev/null || { cp "$1" "$2.new" && mv "$2.new" "$2"; }
    echo "images: $2"
  fi
}

image ocr-detect detect det.onnx
image ocr-recognise recognise rec.onnx keys.txt
image ocr-text text
image noop noop
as=echo-http image echo-http echo-http
image wait wait rec.onnx # so that forks have real parameters
image spin spin
image onnx onnx
models=build/models/minilm
for layer in 1 2 3 4 5 6; do image minilm-layer-$layer onnx layer-$layer.onnx; done
image minilm-tokenize tokenize vocab.txt
image minilm-embed embed embed.onnx vocab.txt
image minilm-encode encode whole.onnx vocab.txt
image minilm-pool pool pool.onnx

# `stagecoach build` checks stages in Python and compiles them for the machine's interpreter. It
# does not import their handlers here, because PyTorch may be missing. The loop does not replace
# existing parameters, because a user may have chosen another size.
for stage in 1 2 3 4 5 6 7 8; do
  [ -f build/models/transformer/$stage.safetensors ] || "$programs/weights" build/models/transformer
done
# python FOLDER NAMES makes the images of functions/torch/FOLDER/stack.yml with these names, unless
# they already exist for these sources.
python() {
  local folder=functions/torch/$1 stamp=$programs/$1.stamp
  state() {
    echo "$images"
    cat image/builder/*.{go,py} "$folder"/{handler.py,stack.yml} templates/python3-stage/stage templates/python3-stage/stagecoach/*.py | sha256sum
    stat -L -c '%n %s %Y' "$folder"/*/*/model.safetensors
    stat -c '%n %Y' "$images"/$2/$version/stage
  }
  [ -f "$stamp" ] && [ "$(state "$@" 2>/dev/null)" = "$(cat "$stamp")" ] && return
  [ -x build/bin/stagecoach ] || { echo "images: build/bin/stagecoach is missing: run make build" >&2; exit 1; }
  build/bin/stagecoach build -check-imports=false -folder -images "$(dirname "$images")" -f "$folder/stack.yml" -filter "$2" >/dev/null
  state "$@" >"$stamp.part"
  mv "$stamp.part" "$stamp"
}
python transformer 'transformer-*'
python minilm 'minilm-torch-layer-*'
