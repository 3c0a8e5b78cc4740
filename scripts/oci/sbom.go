package main

import (
	"cmp"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// bill is the bill of materials of an image.
type bill struct {
	name  string
	debs  []deb
	parts []part
}

// part is a package that is not of Debian.
type part struct{ name, version, purl, license, sha256 string }

// Documents of SPDX 2.3, with the fields that this program uses.
type (
	spdxDocument struct {
		SPDXVersion       string             `json:"spdxVersion"`
		DataLicense       string             `json:"dataLicense"`
		SPDXID            string             `json:"SPDXID"`
		Name              string             `json:"name"`
		DocumentNamespace string             `json:"documentNamespace"`
		CreationInfo      spdxCreation       `json:"creationInfo"`
		Packages          []spdxPackage      `json:"packages"`
		Relationships     []spdxRelationship `json:"relationships"`
	}
	spdxCreation struct {
		Created  string   `json:"created"`
		Creators []string `json:"creators"`
	}
	spdxPackage struct {
		SPDXID           string         `json:"SPDXID"`
		Name             string         `json:"name"`
		VersionInfo      string         `json:"versionInfo"`
		DownloadLocation string         `json:"downloadLocation"`
		FilesAnalyzed    bool           `json:"filesAnalyzed"`
		LicenseConcluded string         `json:"licenseConcluded"`
		LicenseDeclared  string         `json:"licenseDeclared"`
		CopyrightText    string         `json:"copyrightText"`
		Checksums        []spdxChecksum `json:"checksums,omitempty"`
		ExternalRefs     []spdxRef      `json:"externalRefs,omitempty"`
	}
	spdxChecksum struct {
		Algorithm string `json:"algorithm"`
		Value     string `json:"checksumValue"`
	}
	spdxRef struct {
		Category string `json:"referenceCategory"`
		Type     string `json:"referenceType"`
		Locator  string `json:"referenceLocator"`
	}
	spdxRelationship struct {
		Element string `json:"spdxElementId"`
		Type    string `json:"relationshipType"`
		Related string `json:"relatedSpdxElement"`
	}
)

// add adds what Go programs are made of: their modules and Go's library.
func (b *bill) add(programs ...string) error {
	for _, p := range programs {
		info, err := buildinfo.ReadFile(p)
		if err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		b.parts = append(b.parts, part{"stdlib", info.GoVersion, "pkg:golang/stdlib@" + escape(strings.TrimPrefix(info.GoVersion, "go")), "BSD-3-Clause", ""})
		for _, m := range info.Deps {
			if m.Replace != nil {
				m = m.Replace
			}
			b.parts = append(b.parts, part{m.Path, m.Version, "pkg:golang/" + m.Path + "@" + escape(m.Version), "NOASSERTION", ""})
		}
	}
	slices.SortFunc(b.parts, func(x, y part) int {
		return cmp.Or(strings.Compare(x.name, y.name), strings.Compare(x.version, y.version))
	})
	b.parts = slices.Compact(b.parts)
	return nil
}

// onnx adds ONNX Runtime's library, which npm's package onnxruntime-node has.
func (b *bill) onnx(version string, library []byte) {
	sum := sha256.Sum256(library)
	b.parts = append(b.parts, part{"onnxruntime-node", version, "pkg:npm/onnxruntime-node@" + escape(version), "MIT", hex.EncodeToString(sum[:])})
}

// escape escapes a part of a package URL, in which a plus sign would mean a space.
func escape(s string) string { return strings.ReplaceAll(url.PathEscape(s), "+", "%2B") }

// notInID matches what identifiers of SPDX may not have.
var notInID = regexp.MustCompile(`[^a-zA-Z0-9.-]+`)

// json returns the bill as a document of SPDX 2.3. The content alone determines the text.
func (b *bill) json(s source) []byte {
	const image, document = "SPDXRef-Image", "SPDXRef-DOCUMENT"
	doc := spdxDocument{
		SPDXVersion: "SPDX-2.3", DataLicense: "CC0-1.0", SPDXID: document, Name: b.name + "-" + s.version,
		CreationInfo: spdxCreation{s.created.Format("2006-01-02T15:04:05Z"), []string{"Organization: The Stagecoach authors", "Tool: stagecoach-scripts-oci"}},
		Packages: []spdxPackage{{
			SPDXID: image, Name: b.name, VersionInfo: s.version, DownloadLocation: "git+" + website + "@" + s.revision,
			LicenseConcluded: "NOASSERTION", LicenseDeclared: "MIT", CopyrightText: "NOASSERTION",
		}},
		Relationships: []spdxRelationship{{document, "DESCRIBES", image}},
	}
	parts := slices.Clone(b.parts)
	for _, d := range b.debs {
		purl := fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s&distro=debian-12", escape(d.name), escape(d.version), d.arch)
		parts = append(parts, part{d.name, d.version, purl, "NOASSERTION", d.sha256})
	}
	for i, p := range parts {
		pkg := spdxPackage{
			SPDXID: fmt.Sprintf("SPDXRef-Package-%d-%s", i, notInID.ReplaceAllString(p.name, "-")), Name: p.name, VersionInfo: p.version,
			DownloadLocation: "NOASSERTION", LicenseConcluded: "NOASSERTION", LicenseDeclared: p.license, CopyrightText: "NOASSERTION",
			ExternalRefs: []spdxRef{{"PACKAGE-MANAGER", "purl", p.purl}},
		}
		if p.sha256 != "" {
			pkg.Checksums = []spdxChecksum{{"SHA256", p.sha256}}
		}
		doc.Packages = append(doc.Packages, pkg)
		doc.Relationships = append(doc.Relationships, spdxRelationship{image, "CONTAINS", pkg.SPDXID})
	}
	listed, _ := json.Marshal(doc) // of strings and booleans only, so it cannot fail
	doc.DocumentNamespace = fmt.Sprintf("%s/spdx/%s-%x", website, b.name, sha256.Sum256(listed))
	out, _ := json.MarshalIndent(doc, "", "  ")
	return append(out, '\n')
}
