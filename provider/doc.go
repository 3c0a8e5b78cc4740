// Package provider is the management API of OpenFaaS: deploy, update, delete, list, describe and scale functions, and the
// status of the pipelines that they form. It is the only importer of faas-provider, of which it uses the types; the routes
// are the same, on a router of its own that binds nothing and has no global state.
//
// Every change goes into a [Store] and comes back through its watch into the [Registry], which is what all readers see:
// after a restart it is filled from the store, and a change made by another process arrives the same way. A deploy is
// answered when the registry shows it, so that the function can be invoked as soon as faas-cli says so.
//
// What is wrong with one function refuses its deploy with the paths of the bad fields; what is wrong with a pipeline's
// graph is that pipeline's status.
package provider
