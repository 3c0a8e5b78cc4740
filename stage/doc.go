// Package stage is the library of stage binaries. It defines the hooks that a stage's author
// writes, and implements the replica's side of the stage protocol.
//
// A stage has three hooks in every language. Load reads the parameters into host memory, once.
// Place puts them on the replica's device, after the fork. Infer runs a batch. In Go, only Place
// and Infer are left, because package stage/zygote loads an ONNX model before the Go runtime
// starts, so that replicas share it:
//
//	func main() {
//		stage.Main(stage.Hooks{
//			Place: func(ctx context.Context, r *stage.Replica) error { model = r.Model(); return nil },
//			Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) { … }),
//		})
//	}
//
// The same binary is a zygote, a forked replica or an ordinary process, depending on how it is
// started. Package wire describes the stage protocol.
package stage
