//! Who a worker is: a certificate that names it, signed by its fleet's own authority. Nobody else's signature counts, and
//! a certificate serves only the worker whose name it bears.

use std::fmt;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData,
};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::error::{Error, Result};

/// A fleet's authority: whoever holds it can make members of the fleet. It stays with the controller.
pub struct Authority {
    certificate: String,
    key: KeyPair,
}

impl Authority {
    pub fn new() -> Result<Authority> {
        let key = KeyPair::generate().map_err(wrong("make a key"))?;
        let certificate =
            authority_params().self_signed(&key).map_err(wrong("sign the authority's certificate"))?;
        Ok(Authority { certificate: certificate.pem(), key })
    }

    /// An authority that was written down with [`Authority::certificate_pem`] and [`Authority::key_pem`].
    pub fn from_pem(certificate: &str, key: &str) -> Result<Authority> {
        let key = KeyPair::from_pem(key).map_err(wrong("read the authority's key"))?;
        CertificateDer::from_pem_slice(certificate.as_bytes())
            .map_err(wrong("read the authority's certificate"))?;
        Ok(Authority { certificate: certificate.to_owned(), key })
    }

    /// Public: what members check each other by.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate
    }

    /// Secret.
    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    /// An identity for the worker of this name: letters, digits, hyphens, and dots between them.
    pub fn issue(&self, name: &str) -> Result<Identity> {
        self.issue_with(name, &[])
    }

    /// Likewise, for one that is reached under other names and addresses too.
    pub fn issue_with(&self, name: &str, others: &[String]) -> Result<Identity> {
        let key = KeyPair::generate().map_err(wrong("make a key"))?;
        let certificate = self.certify(name, others, &key)?;
        Identity::from_pem(&certificate, &key.serialize_pem(), &self.certificate)
    }

    /// A certificate for a worker that keeps its key to itself, by the request of an [`Applicant`]. Of that only the key
    /// counts, and the proof that its sender has the other half; what else it asks for is not looked at.
    pub fn sign(&self, request: &str, name: &str) -> Result<String> {
        let request = CertificateSigningRequestParams::from_pem(request)
            .map_err(wrong("read the request for a certificate"))?;
        self.certify(name, &[], &request.public_key)
    }

    fn certify(&self, name: &str, others: &[String], key: &impl PublicKeyData) -> Result<String> {
        server_name(name)?;
        let names: Vec<String> =
            std::iter::once(name).chain(others.iter().map(String::as_str)).map(str::to_owned).collect();
        let mut params = CertificateParams::new(names).map_err(wrong("name the worker"))?;
        params.distinguished_name = named(name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let issuer = Issuer::new(authority_params(), &self.key);
        let certificate = params.signed_by(key, &issuer).map_err(wrong("sign a worker's certificate"))?;
        Ok(certificate.pem())
    }
}

/// A worker that is to become a member: a key of its own, which never leaves it.
pub struct Applicant {
    key: KeyPair,
}

impl Applicant {
    pub fn new() -> Result<Applicant> {
        Ok(Applicant { key: KeyPair::generate().map_err(wrong("make a key"))? })
    }

    /// Public: the key's other half, signed with it, for [`Authority::sign`].
    pub fn request_pem(&self) -> Result<String> {
        let request = CertificateParams::default().serialize_request(&self.key);
        request.and_then(|request| request.pem()).map_err(wrong("ask for a certificate"))
    }

    /// With the certificate that came back.
    pub fn admitted(&self, certificate: &str, authority: &str) -> Result<Identity> {
        Identity::from_pem(certificate, &self.key.serialize_pem(), authority)
    }
}

/// The name is the same for every fleet, so that an authority can be read back without taking its certificate apart;
/// what tells authorities apart is their key.
fn authority_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = named("shoal fleet authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

fn named(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn wrong<E: fmt::Display>(action: &'static str) -> impl Fn(E) -> Error {
    move |cause| Error::Identity { action, cause: cause.to_string() }
}

pub fn server_name(name: &str) -> Result<ServerName<'static>> {
    let name = ServerName::try_from(name.to_owned()).map_err(|_| Error::Identity {
        action: "name a worker",
        cause: format!("{name:?} is not made of letters, digits, hyphens and dots"),
    })?;
    Ok(name)
}

/// What a worker proves itself with, and what it checks others by.
#[derive(Clone)]
pub struct Identity {
    certificate_pem: String,
    key_pem: String,
    authority_pem: String,
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

impl fmt::Debug for Identity {
    /// Without the key, which must not reach a log.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Identity").field("certificate", &self.certificate_pem).finish_non_exhaustive()
    }
}

impl Identity {
    pub fn from_pem(certificate: &str, key: &str, authority: &str) -> Result<Identity> {
        let chain = vec![
            CertificateDer::from_pem_slice(certificate.as_bytes())
                .map_err(wrong("read the worker's certificate"))?,
        ];
        let secret = || PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(wrong("read the worker's key"));
        let root = CertificateDer::from_pem_slice(authority.as_bytes())
            .map_err(wrong("read the authority's certificate"))?;
        let mut roots = RootCertStore::empty();
        roots.add(root).map_err(wrong("trust the authority"))?;
        let roots = Arc::new(roots);
        let provider = Arc::new(provider());

        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(wrong("set up TLS"))?
            .with_root_certificates(roots.clone());
        let mut client =
            client.with_client_auth_cert(chain.clone(), secret()?).map_err(wrong("use the certificate"))?;
        client.resumption = rustls::client::Resumption::disabled();

        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(wrong("set up the check of peers"))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(wrong("set up TLS"))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, secret()?)
            .map_err(wrong("use the certificate"))?;
        // Nobody resumes, and nothing goes against a connection's direction once it stands.
        server.send_tls13_tickets = 0;
        Ok(Identity {
            certificate_pem: certificate.to_owned(),
            key_pem: key.to_owned(),
            authority_pem: authority.to_owned(),
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }

    /// Public.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// Secret.
    pub fn key_pem(&self) -> &str {
        &self.key_pem
    }

    /// Public: what the peers of this worker are checked by.
    pub fn authority_pem(&self) -> &str {
        &self.authority_pem
    }
}

/// The AES suite with the shorter key first: bulk data over machines that have AES in hardware.
pub fn provider() -> CryptoProvider {
    use rustls::crypto::ring::cipher_suite::{
        TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
    };
    CryptoProvider {
        cipher_suites: vec![
            TLS13_AES_128_GCM_SHA256,
            TLS13_AES_256_GCM_SHA384,
            TLS13_CHACHA20_POLY1305_SHA256,
        ],
        ..rustls::crypto::ring::default_provider()
    }
}

/// Whether a certificate, whose signature TLS has checked, is this worker's.
pub fn bears_name(certificate: &CertificateDer, name: &ServerName) -> bool {
    ParsedCertificate::try_from(certificate)
        .is_ok_and(|parsed| rustls::client::verify_server_name(&parsed, name).is_ok())
}
