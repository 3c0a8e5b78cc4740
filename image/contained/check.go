package contained

import (
	"context"

	containerd "github.com/containerd/containerd/v2/client"
)

// plugins returns containerd's plugins of a type that work, and the folder of each.
func plugins(ctx context.Context, c *containerd.Client, kind string) (map[string]string, error) {
	all, err := c.IntrospectionService().Plugins(ctx, "type=="+kind)
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, p := range all.Plugins {
		if p.InitErr == nil {
			out[p.ID] = p.Exports["root"]
		}
	}
	return out, nil
}
