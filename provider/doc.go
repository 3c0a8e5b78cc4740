// Package provider is OpenFaaS's management API: deploy, update, delete, list, describe and scale
// functions, and the status of their pipelines. It has the same routes as the package
// faas-provider, but on its own router without global state. It is the only package that imports
// faas-provider, and uses only its types.
//
// Every change goes to a [Store] and comes back through the store's watch into the [Registry],
// which all readers use. After a restart, the registry is filled from the store. Changes by another
// process arrive in the same way. A deploy is answered when the registry shows it, so the function
// can be invoked as soon as faas-cli reports success.
//
// If a function has a fault, its deploy is refused with the paths of the bad fields. A fault in a
// pipeline's graph is shown in that pipeline's status.
package provider
