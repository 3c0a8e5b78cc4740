package accuracy

// family is variants of a stage: accuracies, and milliseconds per item on one device. A batch of n
// takes as long as 0.4 + 0.6 n items.
func family(name string, factor []float64, accuracy, ms []float64) Stage {
	st := Stage{Name: name}
	for k := range accuracy {
		v := Variant{Name: name + string(rune('0'+k)), Accuracy: accuracy[k]}
		if factor != nil {
			v.Factor = factor[k]
		}
		for size := 1; size <= 16; size *= 2 {
			v.Batches = append(v.Batches, Batch{Size: size, Time: ms[k] / 1000 * (0.4 + 0.6*float64(size))})
		}
		st.Variants = append(st.Variants, v)
	}
	return st
}

// traffic is a pipeline like the paper's: YOLOv5 n to x finds cars, which EfficientNet b0 to b7
// classifies, and faces, which four models recognise. Accuracies are normalised per family.
func traffic(replicas int, demand float64) *Problem {
	return &Problem{
		Replicas: replicas,
		Stages: []Stage{
			family("detect", []float64{0.80, 0.92, 0.97, 0.99, 1}, []float64{0.552, 0.737, 0.895, 0.966, 1}, []float64{4.5, 6.4, 8.2, 10.1, 12.1}),
			family("cars", nil, []float64{0.914, 0.935, 0.948, 0.963, 0.984, 0.989, 0.997, 1}, []float64{1.5, 2.1, 2.4, 3.4, 5.6, 9.3, 13.1, 18.2}),
			family("faces", nil, []float64{0.87, 0.93, 0.97, 1}, []float64{1.6, 2.9, 4.4, 6.0}),
		},
		Pipelines: []Pipeline{{
			Name: "traffic", Steps: []Step{{From: 0, To: 1, Branch: 1.6}, {From: 0, To: 2, Branch: 0.5}},
			Objective: 0.25, Hop: 0.002, Queueing: HalfForQueueing, Demand: demand,
		}},
	}
}

// social is a chain like the paper's: four sizes of ResNet classify an image, and four sizes of a
// CLIP-ViT describe it.
func social(replicas int, demand float64) *Problem {
	return &Problem{
		Replicas: replicas,
		Stages: []Stage{
			family("objects", nil, []float64{0.891, 0.936, 0.972, 0.989, 1}, []float64{1.9, 3.1, 4.4, 7.2, 10.3}),
			family("caption", nil, []float64{0.82, 0.88, 0.95, 1}, []float64{3.4, 8.1, 15.4, 31}),
		},
		Pipelines: []Pipeline{{
			Name: "social", Steps: []Step{{From: 0, To: 1}},
			Objective: 0.25, Hop: 0.002, Queueing: HalfForQueueing, Demand: demand,
		}},
	}
}
