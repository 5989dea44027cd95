"""Spanish word lists; `cache.senses` says what each is for."""

from __future__ import annotations

from cache.senses import Senses, groups, words

SPANISH = Senses(
    telltale=words(
        """el los las que como cómo qué una por para mi tu su del al es un con cuál cuánto cuándo
        dónde está puedo hay en se lo y o de la cuántos cuántas quién tengo hacer no me"""
    ),
    function=words(
        """el la los las un una unos unas de del al que qué es son está están ser hay se lo le
        cómo como puedo puede por favor y a en cuál cuáles me gustaría quiero hago hacer"""
    ),
    filler=words("realmente actualmente simplemente hola gracias oye"),
    light=words("forma manera modo pasos"),
    negation=words(
        """no nunca jamás sin ningún ninguna ninguno nada nadie tampoco ni excepto salvo evitar"""
    ),
    markers=groups(
        """
        antes
        después, tras
        desde
        hasta
        durante
        más
        menos
        mejor
        peor
        mayor
        menor
        máximo, máxima
        mínimo, mínima
        sobre, encima
        bajo, debajo
        primero, primer, primera
        último, última
        segundo, segunda
        próximo, próxima, siguiente
        anterior
        solo, sólo, solamente, únicamente
        todo, todos, toda, todas, cada
        ambos, ambas
        siempre
        mitad
        doble
        medio, media
        hoy
        mañana
        ayer
        esta noche
        fue, era, fueron, eran
        será, serán
        debo, debe, tengo que, hay que
        debería
        dentro
        fuera
        con
        contra
        entre
        si
        """
    ),
    persons={
        "yo": "me",
        "mi": "me:has",
        "mis": "me:has",
        "nuestro": "me:has",
        "nuestra": "me:has",
        "tu": "you:has",
        "tus": "you:has",
        "usted": "you",
        "vuestro": "you:has",
        "él": "he",
        "ella": "she",
        "ellos": "they",
        "su": "they:has",
        "sus": "they:has",
    },
    relations=words("de del a al en por para desde hasta hacia con sin sobre entre"),
    same=groups(
        """
        cancelar, cancelo, anular, anulo, dar de baja, doy de baja, cancelación
        cambiar, cambio, modificar, modifico
        activar, activo, habilitar, habilito, encender, enciendo
        desactivar, desactivo, deshabilitar, deshabilito, apagar, apago
        restablecer, restablezco, reiniciar
        comprar, compro, adquirir
        coche, carro, auto
        ordenador, computadora, computador
        móvil, celular, teléfono móvil
        contraseña, clave
        tienda, comercio
        precio, coste, costo, cuánto cuesta, cuánto vale
        pedido, orden
        envío, entrega
        reembolso, devolución del dinero
        horario, horas de apertura, horario de apertura
        """
    ),
    opposite=groups(
        """
        activar, desactivar
        comprar, vender
        abrir, cerrar
        subir, bajar
        encender, apagar
        entrar, salir
        aumentar, reducir, disminuir
        bueno, malo
        grande, pequeño
        frío, caliente
        importar, exportar
        izquierda, derecha
        """
    ),
    negative_prefixes=("des", "in", "im", "i"),
)
