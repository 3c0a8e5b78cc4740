package stagecoach_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A type that has more methods or fields does several things. Split it by what changes together.
const (
	maxMethods = 25
	maxFields  = 20
)

// size is how much a type has: methods, and fields of a struct (an embedded type is one).
type size struct{ methods, fields int }

// largeTypes may be larger than the limits, up to these sizes. They may only shrink: when one does,
// lower its number here, or delete its line if the limits hold.
var largeTypes = map[string]size{
	"autoscaler/plan.Function":     {7, 27},
	"bench/load.Figures":           {1, 21},
	"cmd/stagecoach.up":            {43, 34},
	"control/cluster.Local":        {68, 17},
	"control/cluster.replica":      {3, 35},
	"image.Store":                  {40, 4},
	"keysmanager/network.Networks": {31, 17},
	"keysmanager/node.Server":      {26, 17},
	"keysmanager/sandbox.Command":  {8, 23},
	"pipeline.Function":            {3, 22},
	"provider.Provider":            {56, 5},
	"provider.Registry":            {26, 13},
	"request/gateway.Config":       {0, 21},
	"request/gateway.Gateway":      {38, 6},
	"request/gateway.call":         {2, 22},
	"request/queue.Journal":        {40, 14},
	"sim.stageRecorder":            {13, 24},
	"sim.world":                    {22, 21},
	"sim/study.Result":             {28, 17},
}

// TestTypesAreSmall counts the methods and fields of all types outside tests and generated code.
func TestTypesAreSmall(t *testing.T) {
	t.Parallel()
	known := map[string]bool{}
	for name, p := range packages(t) {
		for typ, got := range sizes(t, p) {
			most, key := size{maxMethods, maxFields}, name+"."+typ
			known[key] = true
			if large, ok := largeTypes[key]; ok {
				most = size{max(most.methods, large.methods), max(most.fields, large.fields)}
				if got.methods <= maxMethods && got.fields <= maxFields || got.methods < large.methods || got.fields < large.fields {
					t.Errorf("%s has %d methods and %d fields, fewer than the exception says (%d, %d): lower it in largeTypes", key, got.methods, got.fields, large.methods, large.fields)
				}
			}
			if got.methods > most.methods || got.fields > most.fields {
				t.Errorf("%s has %d methods and %d fields, want at most %d and %d: split it", key, got.methods, got.fields, most.methods, most.fields)
			}
		}
	}
	for key := range largeTypes {
		if !known[key] {
			t.Errorf("%s is in largeTypes, and no package has it: delete the line", key)
		}
	}
}

// sizes returns the sizes of the types of a package, by name.
func sizes(t *testing.T, p pkg) map[string]size {
	t.Helper()
	all := map[string]size{}
	for _, file := range slices.Concat(p.GoFiles, p.CgoFiles) {
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, file), nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		if ast.IsGenerated(f) {
			continue
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Recv != nil {
					s := all[receiver(d)]
					s.methods++
					all[receiver(d)] = s
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					if typ, ok := spec.(*ast.TypeSpec); ok {
						s := all[typ.Name.Name]
						s.fields = fields(typ)
						all[typ.Name.Name] = s
					}
				}
			}
		}
	}
	return all
}

// receiver returns the name of a method's type.
func receiver(d *ast.FuncDecl) string {
	for e := d.Recv.List[0].Type; ; {
		switch x := e.(type) {
		case *ast.StarExpr:
			e = x.X
		case *ast.IndexExpr:
			e = x.X
		case *ast.IndexListExpr:
			e = x.X
		case *ast.Ident:
			return x.Name
		default:
			return strings.TrimSpace(d.Name.Name)
		}
	}
}

// fields counts the fields of a struct; 0: the type is none.
func fields(typ *ast.TypeSpec) (n int) {
	s, ok := typ.Type.(*ast.StructType)
	if !ok {
		return 0
	}
	for _, f := range s.Fields.List {
		n += max(1, len(f.Names))
	}
	return n
}
