package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
)

// LabelManaged is the label that names the program that manages an object.
const LabelManaged = "app.kubernetes.io/managed-by"

// Managed is the value of [LabelManaged] in objects of this program.
const Managed = "stagecoach"

// object is an object of the core API.
type object interface{ SecretObject | ConfigMap }

// getObject returns an object.
func getObject[T object](ctx context.Context, c *Client, of Objects, name string) (o T, err error) {
	b, err := c.do(ctx, request{method: http.MethodGet, path: of.path(name)})
	if err == nil {
		err = json.Unmarshal(b, &o)
	}
	if err != nil {
		return o, fmt.Errorf("kube: get %s: %q: %w", of, name, err)
	}
	return o, nil
}

// createObject creates an object, and returns it as the cluster has it.
func createObject[T object](ctx context.Context, c *Client, of Objects, name string, o T) (made T, err error) {
	b, err := json.Marshal(o)
	if err == nil {
		b, err = c.do(ctx, request{method: http.MethodPost, path: of.path(""), kind: jsonBody, body: b})
	}
	if err == nil {
		err = json.Unmarshal(b, &made)
	}
	if err != nil {
		return made, fmt.Errorf("kube: create %s: %q: %w", of, name, err)
	}
	return made, nil
}

// patchObject changes an object by a merge patch.
func (c *Client) patchObject(ctx context.Context, of Objects, name string, patch any) error {
	b, err := json.Marshal(patch)
	if err == nil {
		_, err = c.do(ctx, request{method: http.MethodPatch, path: of.path(name), kind: mergePatch, body: b})
	}
	if err != nil {
		return fmt.Errorf("kube: patch %s: %q: %w", of, name, err)
	}
	return nil
}

// deleteObject deletes the object with this uid. An object that does not exist is no error. An
// error for which [Conflict] is true says that another object has the name now.
func (c *Client) deleteObject(ctx context.Context, of Objects, name, uid string) error {
	body := fmt.Appendf(nil, `{"apiVersion":"v1","kind":"DeleteOptions","propagationPolicy":"Background","preconditions":{"uid":%q}}`, uid)
	_, err := c.do(ctx, request{method: http.MethodDelete, path: of.path(name), kind: jsonBody, body: body})
	if err != nil && !NotFound(err) {
		return fmt.Errorf("kube: delete %s: %q: %w", of, name, err)
	}
	return nil
}

// SecretObject is the part of a Secret that this package uses.
type SecretObject struct {
	APIVersion string            `json:"apiVersion,omitempty"`
	Kind       string            `json:"kind,omitempty"`
	Metadata   Meta              `json:"metadata"`
	Type       string            `json:"type,omitempty"`
	Data       map[string][]byte `json:"data,omitempty"`
}

func (s Secret) objects() Objects { return Objects{Resource: "secrets", Namespace: s.Namespace} }

// Secret returns a Secret.
func (c *Client) Secret(ctx context.Context, s Secret) (SecretObject, error) {
	return getObject[SecretObject](ctx, c, s.objects(), s.Name)
}

// CreateSecret creates a Secret of type Opaque.
func (c *Client) CreateSecret(ctx context.Context, s Secret, labels map[string]string, data map[string][]byte) error {
	o := SecretObject{APIVersion: "v1", Kind: "Secret", Metadata: Meta{Name: s.Name, Namespace: s.Namespace, Labels: labels}, Type: "Opaque", Data: data}
	_, err := createObject(ctx, c, s.objects(), s.Name, o)
	return err
}

// DeleteSecret deletes the Secret with this uid.
func (c *Client) DeleteSecret(ctx context.Context, s Secret, uid string) error {
	return c.deleteObject(ctx, s.objects(), s.Name, uid)
}

// ConfigMap is the part of a ConfigMap that this package uses.
type ConfigMap struct {
	APIVersion string            `json:"apiVersion,omitempty"`
	Kind       string            `json:"kind,omitempty"`
	Metadata   Meta              `json:"metadata"`
	Data       map[string]string `json:"data,omitempty"`
	Binary     map[string][]byte `json:"binaryData,omitempty"`
}

func configMaps(namespace string) Objects {
	return Objects{Resource: "configmaps", Namespace: namespace}
}

// ConfigMap returns a ConfigMap.
func (c *Client) ConfigMap(ctx context.Context, namespace, name string) (ConfigMap, error) {
	return getObject[ConfigMap](ctx, c, configMaps(namespace), name)
}

// CreateConfigMap creates a ConfigMap, and returns it as the cluster has it.
func (c *Client) CreateConfigMap(ctx context.Context, m ConfigMap) (ConfigMap, error) {
	m.APIVersion, m.Kind = "v1", "ConfigMap"
	return createObject(ctx, c, configMaps(m.Metadata.Namespace), m.Metadata.Name, m)
}

// PatchConfigMap changes the fields of a ConfigMap that a merge patch names.
func (c *Client) PatchConfigMap(ctx context.Context, namespace, name string, patch any) error {
	return c.patchObject(ctx, configMaps(namespace), name, patch)
}

// DeleteConfigMap deletes the ConfigMap with this uid. Its dependents are deleted afterwards.
func (c *Client) DeleteConfigMap(ctx context.Context, namespace, name, uid string) error {
	return c.deleteObject(ctx, configMaps(namespace), name, uid)
}
