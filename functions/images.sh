#!/usr/bin/env bash
# Builds the functions' images for the process runtime: folders IMAGES/stagecoach/NAME/0.1.0 with an executable `stage` and
# the model files it loads. A second run builds only what changed.
#
#   functions/images.sh build/images
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 IMAGES" >&2; exit 2; }
mkdir -p "$1"
images=$(cd "$1" && pwd)/stagecoach
cd "$(dirname "$0")/.."
version=0.1.0
models=build/models/ocr

# image NAME PACKAGE [FILE ...] makes one image; each FILE of the models' folder goes into its folder `model`. A package is
# built once for images that follow each other. With program=NAME it is a function of another kind, which is no `stage`.
built=
image() {
  local to=$images/$1/$version package=$2 file
  shift 2
  mkdir -p "$to/model"
  if [ "$package" != "$built" ]; then
    rm -f "$images/.part" # it may be an image's too
    ${GO:-go} build -trimpath -buildvcs=false -o "$images/.part" "./functions/$package" # the same source, the same image
    built=$package
  fi
  put "$images/.part" "$to/${program:-stage}"
  for file in "$@"; do
    [ -f "$models/$file" ] || { echo "images: $models/$file is missing: run make fetch" >&2; exit 1; }
    put "$models/$file" "$to/model/$file"
  done
}

# put links FROM to TO, or copies it to another file system, unless TO has its content already. A file in use is replaced,
# not written to.
put() {
  if ! cmp -s "$1" "$2"; then
    ln -f "$1" "$2" 2>/dev/null || { cp "$1" "$2.new" && mv "$2.new" "$2"; }
    echo "images: $2"
  fi
}

image ocr-detect ocr/detect det.onnx
image ocr-recognise ocr/recognise rec.onnx keys.txt
image ocr-text ocr/text
image noop noop
program=echo-http image echo-http echo-http
image wait wait rec.onnx # forks that carry real parameters
image onnx onnx
models=build/models/minilm
for layer in 1 2 3 4 5 6; do image minilm-layer-$layer onnx layer-$layer.onnx; done
image minilm-embed minilm/embed embed.onnx vocab.txt
image minilm-pool minilm/pool pool.onnx
rm -f "$images/.part"
