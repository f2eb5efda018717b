//! TLS between the controller and everyone else. The controller's certificate bears one fixed name, whatever address it
//! listens on: what counts is which authority has signed it. Workers prove themselves by theirs; commands by a token.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme,
};
use shoal_net::identity::{Identity, provider};

use crate::error::{Error, Result};

/// Workers' names have no dots, so none can be this.
pub const CONTROLLER: &str = "controller.shoal";

fn wrong<E: std::fmt::Display>(action: &'static str) -> impl Fn(E) -> Error {
    move |cause| Error::Identity(shoal_net::Error::Identity { action, cause: cause.to_string() })
}

fn certificate(pem: &str) -> Result<CertificateDer<'static>> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(wrong("read a certificate"))
}

fn roots(authority: CertificateDer<'static>) -> Result<Arc<RootCertStore>> {
    let mut roots = RootCertStore::empty();
    roots.add(authority).map_err(wrong("trust the authority"))?;
    Ok(Arc::new(roots))
}

/// What a join token says of an authority.
pub fn authority_hash(authority_pem: &str) -> Result<blake3::Hash> {
    Ok(blake3::hash(&certificate(authority_pem)?))
}

/// The controller's side. Whoever has a certificate shows it; who may do what without one is the API's affair. The
/// authority's certificate is sent along, for those who know only its hash.
pub fn server(identity: &Identity) -> Result<Arc<ServerConfig>> {
    let authority = certificate(identity.authority_pem())?;
    let provider = Arc::new(provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots(authority.clone())?, provider.clone())
        .allow_unauthenticated()
        .build()
        .map_err(wrong("set up the check of workers"))?;
    let key = PrivateKeyDer::from_pem_slice(identity.key_pem().as_bytes()).map_err(wrong("read a key"))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(wrong("set up TLS"))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![certificate(identity.certificate_pem())?, authority], key)
        .map_err(wrong("use the certificate"))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// A worker's side.
pub fn member(identity: &Identity) -> Result<Arc<ClientConfig>> {
    let key = PrivateKeyDer::from_pem_slice(identity.key_pem().as_bytes()).map_err(wrong("read a key"))?;
    let config = client()?
        .with_root_certificates(roots(certificate(identity.authority_pem())?)?)
        .with_client_auth_cert(vec![certificate(identity.certificate_pem())?], key)
        .map_err(wrong("use the certificate"))?;
    Ok(Arc::new(config))
}

/// A command's side.
pub fn trusting(authority_pem: &str) -> Result<Arc<ClientConfig>> {
    let roots = roots(certificate(authority_pem)?)?;
    Ok(Arc::new(client()?.with_root_certificates(roots).with_no_client_auth()))
}

/// The side of one who has nothing but a join token.
pub fn pinned(authority: blake3::Hash) -> Result<Arc<ClientConfig>> {
    let verifier = Arc::new(Pinned { authority, provider: Arc::new(provider()) });
    Ok(Arc::new(client()?.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth()))
}

fn client() -> Result<rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>> {
    ClientConfig::builder_with_provider(Arc::new(provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(wrong("set up TLS"))
}

/// Trusts the authority of one hash, wherever it is met: it must be in the chain, and the rest is as ever.
#[derive(Debug)]
struct Pinned {
    authority: blake3::Hash,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let unknown = || rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let authority = intermediates.iter().find(|certificate| blake3::hash(certificate) == self.authority);
        let mut roots = RootCertStore::empty();
        roots.add(authority.ok_or_else(unknown)?.clone().into_owned())?;
        let usual = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone())
            .build()
            .map_err(|_| unknown())?;
        usual.verify_server_cert(end_entity, &[], server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
