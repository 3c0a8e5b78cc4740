// Package templatetest_test checks the files of the templates, and runs the Python SDK of the
// template python3-stage. It is outside the folder templates, because `faas-cli template pull`
// copies that whole folder. The tests of `stagecoach build` check that templates build and serve.
package templatetest_test

import (
	"bytes"
	"encoding/binary"
	"flag"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/third_party/onnx/onnxpb"
	"github.com/stagecoach-serving/stagecoach/tensor/onnx"
)

// templates is the templates' folder.
const templates = "../../templates"

var rewrite = flag.Bool("rewrite", false, "write the files that are made by these tests")

// TestModelOfOnnxStageIsGenerated writes the model of onnx-stage, y = 2x + 1, and compares it with
// the file.
func TestModelOfOnnxStageIsGenerated(t *testing.T) {
	scalar := func(name string, v float32) *onnxpb.TensorProto {
		raw, _ := binary.Append(nil, binary.LittleEndian, v)
		return &onnxpb.TensorProto{Name: &name, DataType: proto.Int32(int32(onnxpb.TensorProto_FLOAT)), RawData: raw}
	}
	value := func(name string) *onnxpb.ValueInfoProto {
		return &onnxpb.ValueInfoProto{Name: &name, Type: &onnxpb.TypeProto{Value: &onnxpb.TypeProto_TensorType{TensorType: &onnxpb.TypeProto_Tensor{
			ElemType: proto.Int32(int32(onnxpb.TensorProto_FLOAT)),
			Shape: &onnxpb.TensorShapeProto{Dim: []*onnxpb.TensorShapeProto_Dimension{
				{Value: &onnxpb.TensorShapeProto_Dimension_DimParam{DimParam: "n"}},
			}},
		}}}}
	}
	m := &onnxpb.ModelProto{
		IrVersion: proto.Int64(8), OpsetImport: []*onnxpb.OperatorSetIdProto{{Domain: proto.String(""), Version: proto.Int64(17)}},
		Graph: &onnxpb.GraphProto{
			Name:  proto.String("y = 2x + 1"),
			Input: []*onnxpb.ValueInfoProto{value("x")}, Output: []*onnxpb.ValueInfoProto{value("y")},
			Initializer: []*onnxpb.TensorProto{scalar("two", 2), scalar("one", 1)},
			Node: []*onnxpb.NodeProto{
				{OpType: proto.String("Mul"), Input: []string{"x", "two"}, Output: []string{"2x"}},
				{OpType: proto.String("Add"), Input: []string{"2x", "one"}, Output: []string{"y"}},
			},
		},
	}
	const file = templates + "/onnx-stage/function/model/model.onnx"
	made := filepath.Join(t.TempDir(), "model.onnx")
	if *rewrite {
		made = file
	}
	if err := onnx.Write(made, m); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(made)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s (%v) is not what this test makes: go test ./internal/templatetest -rewrite", file, err)
	}
}

// TestGoTemplatesDifferOnlyInHandlers checks that the Go templates differ only in their handlers.
func TestGoTemplatesDifferOnlyInHandlers(t *testing.T) {
	a, err := os.ReadFile(templates + "/go-stage/main.go")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(templates + "/onnx-stage/main.go"); err != nil || !bytes.Equal(a, b) {
		t.Errorf("main.go of onnx-stage differs (%v)", err)
	}
}

// TestDockerImagesHaveTheLabelOfStages checks that images that Docker builds have the label that
// marks a stage, like those of `stagecoach build`.
func TestDockerImagesHaveTheLabelOfStages(t *testing.T) {
	for _, file := range []string{"go-stage/Dockerfile", "onnx-stage/Dockerfile", "python3-stage/Dockerfile"} {
		want := "\nLABEL " + image.ProtocolLabel + "=" + image.ProtocolVersion + "\n"
		if b, err := os.ReadFile(filepath.Join(templates, file)); err != nil || !bytes.Contains(b, []byte(want)) {
			t.Errorf("%s has no line %q (%v)", file, want, err)
		}
	}
}

// TestPullCopiesOnlyTemplates lists what `faas-cli template pull` copies, as git has it: the
// folders below template, which is a link to templates.
func TestPullCopiesOnlyTemplates(t *testing.T) {
	if to, err := os.Readlink("../../template"); err != nil || to != "templates" {
		t.Errorf("template leads to %q (%v), want templates", to, err)
	}
	cmd := exec.CommandContext(t.Context(), "git", "ls-files")
	cmd.Dir = templates
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"go-stage/Dockerfile", "go-stage/README.md", "go-stage/function/handler.go", "go-stage/function/handler_test.go",
		"go-stage/main.go", "go-stage/template.yml",
		"onnx-stage/Dockerfile", "onnx-stage/README.md", "onnx-stage/function/handler.go",
		"onnx-stage/function/model/model.onnx", "onnx-stage/main.go", "onnx-stage/template.yml",
		"python3-stage/Dockerfile", "python3-stage/README.md", "python3-stage/function/handler.py",
		"python3-stage/function/requirements.txt", "python3-stage/function/test_handler.py", "python3-stage/stage",
		"python3-stage/template.yml",
	}
	var got []string
	for _, file := range strings.Fields(string(out)) {
		if sdk, is := strings.CutPrefix(file, "python3-stage/stagecoach/"); !is {
			got = append(got, file)
		} else if strings.HasPrefix(sdk, "test_") || path.Ext(sdk) != ".py" || strings.Contains(sdk, "/") {
			t.Errorf("%s: want modules of the SDK alone in its folder", file)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("a pull copies\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
