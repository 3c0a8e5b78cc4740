// Package stage is what a stage binary imports: hooks for its author, and the replica's side of the stage protocol.
//
// A stage has three hooks, whatever its language: load parameters into host memory, once; place them on the replica's
// device, after the fork; infer a batch. In Go, loading an ONNX model is done by package stage/zygote before the Go runtime
// starts, so that replicas share it; what is left are Place and Infer:
//
//	func main() {
//		stage.Main(stage.Hooks{
//			Place: func(ctx context.Context, r *stage.Replica) error { model = r.Model(); return nil },
//			Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) { … }),
//		})
//	}
//
// The same binary is a zygote, a forked replica or an ordinary process, depending on how it is started. The stage protocol
// is described in package wire.
package stage
